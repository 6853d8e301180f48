"""Reads a folder of pictures into arrays: train/ and test/ with a subfolder for each class, named after it.

    train/cat/1.png, train/dog/1.png, ..., test/cat/1.png, ...

All must have the size of the first and be grey or in colour as it is. If no pixel of any of them has a colour, they count as grey
in whatever mode they are stored, since many programs write RGB.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tqdm import tqdm

from training.errors import DataError
from training.sources import PARTS

MOST_FAULTS = 10  # that are reported at once, since all such files have to be repaired or moved away
OPAQUE = 255  # of an alpha channel
MODES = {"1": "L", "L": "L", "P": "RGB", "RGB": "RGB"}  # modes of pictures in files -> grey or colour


@dataclass(frozen=True)
class Pictures:
    images: NDArray[np.uint8]  # (n, C, H, W)
    labels: NDArray[np.int64]  # (n,), indices into the list of classes


def read(folder: Path) -> tuple[tuple[str, ...], Pictures, Pictures]:
    """Return the classes, the training pictures and the test pictures."""
    classes = tuple(sorted({_class_name(path) for path in _visible(folder / PARTS[0]) if path.is_dir()}))
    if len(classes) < 2:
        raise DataError(f"{folder / PARTS[0]}: expected a subfolder for each of at least two classes, found {len(classes)}")
    train, test = (_part(folder / part, classes) for part in PARTS)
    if _colourless(train) and _colourless(test):
        train, test = (Pictures(np.ascontiguousarray(part.images[:, :1]), part.labels) for part in (train, test))
    return classes, train, test


def _colourless(pictures: Pictures) -> bool:
    return all(np.array_equal(pictures.images[:, 0], pictures.images[:, other]) for other in range(1, pictures.images.shape[1]))


def _part(folder: Path, classes: tuple[str, ...]) -> Pictures:
    """Read train/ or test/ in an order that is always the same and mixes classes: the last pictures are held out."""
    files = [(path, classes.index(_class_name(path.parent))) for path in _files(folder, classes)]
    if not files:
        raise DataError(f"{folder}: holds no pictures; expected them in a subfolder for each class")
    order = _mixed_order([label for _, label in files])
    images, faults, expected = [], [], None
    for place in tqdm(order, desc=f"{folder.name}/", unit="img", leave=False):
        path = files[place][0]
        try:
            image = _picture(path)
            expected = expected or (image.mode, image.size)
            if (image.mode, image.size) != expected:
                raise DataError(f"{path}: expected {_kind_of(*expected)} as others are, found {_kind_of(image.mode, image.size)}")
            images.append(np.asarray(image))
        except DataError as error:
            faults.append(str(error))
    if faults:
        more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
        raise DataError("\n".join([*faults[:MOST_FAULTS], *more]))
    stacked = np.stack(images)
    planes = stacked[:, None] if stacked.ndim == 3 else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))
    return Pictures(planes, np.array([files[place][1] for place in order], np.int64))


def _mixed_order(labels: list[int]) -> list[int]:
    """Indices in a random order over which every class is spread evenly, with one picture of each at the very end.

    So each class has its share of the pictures that are held out, however few, and of the others.
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    totals, seen, share = Counter(labels), Counter[int](), {}
    for place in shuffled:
        seen[labels[place]] += 1
        share[place] = seen[labels[place]] / totals[labels[place]]
    return sorted(shuffled, key=share.__getitem__)


def _files(folder: Path, classes: tuple[str, ...]) -> list[Path]:
    files = []
    for path in _visible(folder):
        if not path.is_dir():
            raise DataError(f"{path}: expected a subfolder for each class, found a file; move it away")
        if _class_name(path) not in classes:
            raise DataError(f"{path}: no training picture is of this class; {PARTS[0]}/ has {', '.join(classes)}")
        files += _visible(path)
    return files


def _class_name(folder: Path) -> str:
    """The folder's name in NFC, as typed: archives made on a Mac separate an accent from its letter, which looks the same."""
    return unicodedata.normalize("NFC", folder.name)


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _picture(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            if image.mode not in MODES:
                raise DataError(f"{path}: expected grey pictures or RGB of 8 bits, found {image.mode}; convert it")
            if image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < OPAQUE:
                raise DataError(f"{path}: expected a picture without transparent parts; lay it over a background first")
            return _upright(image).convert(MODES[image.mode])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: expected a picture, found an unreadable file ({error}); repair it or move it away") from error


def _upright(image: Image.Image) -> Image.Image:
    """Turn a picture the way its EXIF says, as viewers and the service do."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # on broken metadata Pillow raises one of many types; the picture itself may be fine
        return image


def _kind_of(mode: str, size: tuple[int, int]) -> str:
    width, height = size
    return kind(1 if mode == "L" else 3, height, width)


def kind(channels: int, height: int, width: int) -> str:
    return f"{'grey' if channels == 1 else 'colour'} {height}x{width}"
