"""A data set as tensors: pictures with their labels, split into training and validation. sources.py finds the files.

Files are checked: one that is truncated, mislabelled or altered raises an error that names it.
Two-digit pictures and augmentation are made later, on the device (pairs.py, augment.py).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.bundle import BOX, FRAME
from service.manifest import LONGEST_NAME
from training import pictures
from training.errors import DataError, chosen
from training.sources import FILES, PARTS, SOURCES, Source, check, file_of, find, holds_another_set, holds_pictures, unpack

SAMPLE_SIZE = 1_000  # training pictures sampled to tell whether ink is light, and fitted into a box
FAINT = 25  # of 255: up to this level it is not ink, but what JPEG or a scanner leaves around it
BOXED_SHARE = 0.9  # share of them that must fill the box; of MNIST's pictures, 999 in 1,000 do
IDX_IMAGES, IDX_LABELS = 0x0803, 0x0801  # magic numbers: unsigned bytes, three dimensions or one
CLASS_NAMES_FILE = "classes.txt"  # names of classes, beside the idx files of a folder
DATA_HINT = "pass the --data it was trained with"  # advice to whoever has other data


@dataclass(frozen=True)
class Digits:
    """Pictures, in the bytes of the files, with their labels."""

    images: Tensor  # (n, C, H, W), uint8
    labels: Tensor  # (n,), int64

    def to(self, device: torch.device) -> Digits:
        return Digits(self.images.to(device), self.labels.to(device))

    def __getitem__(self, picked: slice | Tensor) -> Digits:
        return Digits(self.images[picked], self.labels[picked])

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, most: int) -> Digits:
        """Return at most `most` of them, evenly spaced over the whole, since files may be sorted."""
        return self[torch.linspace(0, len(self) - 1, min(most, len(self))).long()]


@dataclass(frozen=True)
class DataSet:
    name: str
    folder: Path  # where it was found
    classes: tuple[str, ...]
    train: Digits = field(repr=False)
    test: Digits = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """Identifies the training pictures and labels, so that a run is not resumed on others."""
        content = hashlib.sha256(self.train.images.numpy().tobytes())
        content.update(self.train.labels.numpy().tobytes())
        return content.hexdigest()

    def expect(self, digest: str | None) -> None:
        """Raise unless these are the training pictures with this digest; None, where it is not known, accepts any."""
        if digest not in (None, self.digest):
            raise DataError(
                f"{self.folder}: expected the training pictures that were learned (sha256 {str(digest)[:12]}), "
                f"found others ({self.digest[:12]}); {DATA_HINT}"
            )

    def split(self, held_out: int) -> tuple[Digits, Digits]:
        """Split into training pictures and the last `held_out`, by which all choices are made; none is made by the test set."""
        count = len(self.train)
        if not 0 < held_out < count:
            raise DataError(
                f"{self.folder}: expected to hold out between 1 and {count - 1} of the {count} training pictures "
                f"(--validation of `captrain train`), got {held_out}; a tenth is {max(count // 10, 1)}"
            )
        training, validation = self.train[: count - held_out], self.train[count - held_out :]
        for index, name in enumerate(self.classes):
            members = int((self.train.labels == index).sum())
            if members < 2:
                raise DataError(
                    f"{self.folder}: class {name!r} has {members or 'no'} training picture: give it at least two, one to learn "
                    "from and one that is held out, or remove it"
                )
        parts = {
            f"last {held_out} training pictures, which are held out to choose by": validation,
            "others, to learn from": training,
        }
        for description, part in parts.items():
            for index, name in enumerate(self.classes):
                if not (part.labels == index).any():
                    raise DataError(
                        f"class {name!r} is in none of the {description}; change how many are held out with --validation, "
                        "or shuffle idx files that are sorted by class"
                    )
        return training, validation

    @cached_property
    def boxed(self) -> bool:
        """Whether ink was fitted into a box as in MNIST: its longer side is 20 pixels of 28, or in proportion for other sizes.

        If so, the service does the same.
        """
        images = self.train.sample(SAMPLE_SIZE).images
        if images.shape[1] != 1:
            return False
        ink, scale = images[:, 0] > FAINT, min(images.shape[2:]) / FRAME[1]
        longer = torch.maximum(_extent(ink.any(dim=2)), _extent(ink.any(dim=1)))
        return bool(((longer - BOX[1] * scale).abs() <= max(scale, 1) / 2).float().mean() > BOXED_SHARE)

    @cached_property
    def dark_on_light(self) -> bool:
        """Whether most pictures are light at their edges, unlike what training moves in from outside or lays over them.

        Never so in colour: those are photographs, and their negatives would be no better.
        """
        images = self.train.sample(SAMPLE_SIZE).images
        if images.shape[1] != 1:
            return False
        edges = torch.cat([images[..., [0, -1], :].flatten(1), images[..., [0, -1]].flatten(1)], dim=1)
        return bool(edges.median() > 127)


def load(dataset: str, folder: Path | None = None, any_files: bool = False) -> DataSet:
    """Load a data set from its own files, which must have the known checksums if any, or from `any_files` of the same classes."""
    source = chosen("data set", dataset, SOURCES)
    root = find(dataset, folder)
    if any_files:
        if source.classes and not holds_pictures(root) and holds_another_set(root, dataset):  # `folder` may hold a known set
            raise DataError(f"{root}: expected pictures of the classes of {dataset}, found another known data set")
        source = Source(() if (root / CLASS_NAMES_FILE).exists() else source.classes)
    elif source.classes and holds_pictures(root):
        raise DataError(f"{root}: expected the four idx files of {dataset}, found folders of pictures (--dataset folder)")
    elif not source.classes and not holds_pictures(root) and any((root / part).is_dir() for part in PARTS):
        raise DataError(
            f"{root}: holds idx files and folders of pictures ({', '.join(PARTS)}); move away those that are not meant"
        )
    classes, train, test = _from_pictures(root) if holds_pictures(root) else _from_idx_files(root, source)
    if long := [name for name in classes if len(name) > LONGEST_NAME]:
        raise DataError(
            f"{root}: expected names of classes of at most {LONGEST_NAME} characters, found {long[0][:LONGEST_NAME]}..."
        )
    if not_utf8 := [name for name in classes if name.encode(errors="replace").decode() != name]:
        raise DataError(f"{root}: expected names of classes in UTF-8, found {not_utf8[0]!r}; rename the folder")
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(f"{root}: training pictures are {_size(train)}, test pictures {_size(test)}; expected one size")
    return DataSet(dataset, root, classes, train, test)


def _from_pictures(folder: Path) -> tuple[tuple[str, ...], Digits, Digits]:
    classes, *parts = pictures.read(folder)
    train, test = (Digits(torch.from_numpy(each.images), torch.from_numpy(each.labels)) for each in parts)
    return classes, train, test


def _from_idx_files(folder: Path, source: Source) -> tuple[tuple[str, ...], Digits, Digits]:
    """Read idx files; labels become indices into the list of classes, whatever numbers are in the files."""
    train = _digits(folder, FILES[0], FILES[1], source)
    test = _digits(folder, FILES[2], FILES[3], source)
    present = torch.arange(len(source.classes)) if source.classes else train.labels.unique()
    if len(present) < 2:
        raise DataError(f"{folder / FILES[1]}: expected at least two classes, found {len(present)}")
    for name, digits in ((FILES[1], train), (FILES[3], test)):
        outside = digits.labels[~torch.isin(digits.labels, present)]
        if len(outside):
            raise DataError(
                f"{folder / name}: label {int(outside[0])} is outside the {len(present)} classes"
                + ("" if source.classes else ": no training picture has it")
            )
    classes = source.classes or _class_names(folder, present.tolist())
    train, test = (Digits(each.images, torch.searchsorted(present, each.labels)) for each in (train, test))
    return classes, train, test


def read_idx(content: bytes, magic: int, origin: Path) -> NDArray[np.uint8]:
    """The array in an idx file: a magic number, big-endian dimensions, then bytes."""
    dimensions = magic & 0xFF
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(f"{origin}: {len(content)} bytes are too few for an idx header of {header}")
    found, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    if found != magic:
        expectation = f"{dimensions} dimensions of bytes" + (", grey pictures" if magic == IDX_IMAGES else "")
        raise DataError(f"{origin}: expected idx magic 0x{magic:08x} ({expectation}), found 0x{found:08x}")
    size = int(np.prod(shape))
    if len(content) - header != size:
        raise DataError(f"{origin}: header promises {size} bytes ({'x'.join(map(str, shape))}), found {len(content) - header}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _digits(folder: Path, images_name: str, labels_name: str, source: Source) -> Digits:
    images = _read(folder, images_name, IDX_IMAGES, source)
    labels = _read(folder, labels_name, IDX_LABELS, source)
    if len(images) != len(labels):
        raise DataError(f"{folder / labels_name}: expected {len(images)} labels, one for each picture, found {len(labels)}")
    if not len(images):
        raise DataError(f"{folder / images_name}: holds no pictures")
    return Digits(torch.from_numpy(images.copy()).unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))


def _read(folder: Path, name: str, magic: int, source: Source) -> NDArray[np.uint8]:
    path = file_of(folder, name)
    if path is None:
        raise DataError(f"{folder / name}: no such file, nor {name}.gz")
    content = path.read_bytes()
    packed = content if path.suffix == ".gz" else None
    unpacked = content if packed is None else unpack(packed, path)
    array = read_idx(unpacked, magic, path)  # before the checksum, since its error says more precisely what is wrong
    check(unpacked, packed, name, source, origin=str(path))
    return array


def _class_names(folder: Path, labels: list[int]) -> tuple[str, ...]:
    """Names of the labels that occur, in their order: the lines of classes.txt, or else the numbers themselves."""
    path = folder / CLASS_NAMES_FILE
    if not path.exists():
        return tuple(map(str, labels))
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows add a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a text in UTF-8, found {error}") from error
    names = tuple(name for line in text.splitlines() if (name := line.strip()))
    if len(names) != len(labels):
        raise DataError(f"{path}: expected one name per line for the {len(labels)} labels that occur, found {len(names)}")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: expected different names, found {repeated[0]} more than once")
    return names


def _extent(marked: Tensor) -> Tensor:
    """Pixels from the first mark to the last: (n, side) -> (n,); the whole side where there is none."""
    side = marked.shape[1]
    first, last = (each.int().argmax(dim=1) for each in (marked, marked.flip(1)))
    return side - first - last


def _size(digits: Digits) -> str:
    return pictures.kind(*digits.images.shape[1:])
