"""A data set of the tests' own: ten shapes drawn with Pillow, written as the four idx files or as pictures in folders."""

import gzip
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from training.data import IDX_IMAGES, IDX_LABELS
from training.sources import FILES, PARTS

CLASSES = 10


def digit(label: int, generator: np.random.Generator, side: int = 28) -> NDArray[np.uint8]:
    picture = Image.new("L", (side, side))
    corner = generator.uniform(0.25, 0.35, size=2) * side - 2
    font = ImageFont.load_default(size=float(generator.uniform(0.6, 0.75)) * side)
    ImageDraw.Draw(picture).text((corner[0], corner[1] - side * 0.15), str(label), fill=255, font=font)
    return np.asarray(picture)


def write(folder: Path, train: int = 400, test: int = 60, side: int = 28, seed: int = 0, dark: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for count, (images_name, labels_name) in ((train, FILES[:2]), (test, FILES[2:])):
        labels = np.arange(count) % CLASSES
        images = np.stack([digit(int(label), generator, side) for label in labels])
        write_idx(folder / f"{images_name}.gz", 255 - images if dark else images, IDX_IMAGES)
        write_idx(folder / f"{labels_name}.gz", labels.astype(np.uint8), IDX_LABELS)
    return folder


def write_pictures(folder: Path, mode: str = "L", train: int = 400, test: int = 60) -> Path:
    """Write pictures with names that are not in the order of classes; in colour, each class has a colour of its own."""
    generator = np.random.default_rng(0)
    for part, count in zip(PARTS, (train, test), strict=True):
        for number in range(count):
            label = number % CLASSES
            picture = Image.fromarray(digit(label, generator))
            if mode == "RGB":
                shades = [(label + 1) / CLASSES, 1 - label / CLASSES, 1.0]
                picture = Image.merge("RGB", [picture.point(lambda level, s=shade: int(level * s)) for shade in shades])
            path = folder / part / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    return folder


def write_idx(path: Path, values: NDArray[np.uint8], magic: int) -> None:
    content = struct.pack(f">{1 + values.ndim}I", magic, *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
