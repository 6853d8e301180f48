"""Idx files -> tensors: MNIST, Fashion-MNIST, KMNIST and any folder of four such files, by one reader.

Finds files in the folder asked for, then in $CAPSERVE_DATA, then in a cache it fills from public mirrors.
What it hands out is checked: a file that is truncated, mislabelled or altered is an error that names it.
Two-digit pictures and augmentation are made later, on the device (pairs.py, augment.py).
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import struct
import urllib.request
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from service.bundle import BOX
from training.errors import DataError, chosen

FRAME = (28, 28)  # pixels of MNIST's pictures
SAMPLE, MOST = 1_000, 0.9  # pictures looked at; the share that makes a rule. Of MNIST's 999 in 1,000 fill their box
IDX_IMAGES, IDX_LABELS = 0x0803, 0x0801  # magic numbers: unsigned bytes, three dimensions or one
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class Source:
    """A known data set: where it is to be had, its class names, the md5 of its four files in the order of FILES."""

    classes: tuple[str, ...]
    mirrors: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()  # of the .gz as its publisher made it, for a set whose unpacked sums are not published

    def expected(self, name: str, packed: bool) -> str | None:
        sums = self.packed if packed else self.unpacked
        return sums[FILES.index(name)] if sums else None


DIGITS = tuple("0123456789")
SOURCES: dict[str, Source] = {
    "mnist": Source(
        DIGITS,
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        unpacked=(
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
    ),
    "fashion": Source(
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        unpacked=(
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
    ),
    "kmnist": Source(
        ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        mirrors=("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
        packed=(
            "bdb82020997e1d708af4cf47b453dcf7",
            "e144d726b3acfaa3e44228e80efcd344",
            "5c965bf0a639b31b8f53240b1b52f4d7",
            "7320c461ea6c1c855c0b718fb2a4b134",
        ),
    ),
    "folder": Source(()),  # any four idx files: the classes are the labels found
}


@dataclass(frozen=True)
class Digits:
    """Pictures with their labels, as they lie in the files."""

    images: Tensor  # (n, 1, H, W), uint8
    labels: Tensor  # (n,), int64

    def to(self, device: torch.device) -> Digits:
        return Digits(self.images.to(device), self.labels.to(device))

    def __getitem__(self, picked: slice | Tensor) -> Digits:
        return Digits(self.images[picked], self.labels[picked])

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class DataSet:
    name: str
    folder: Path  # where it was found
    classes: tuple[str, ...]
    train: Digits = field(repr=False)
    test: Digits = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """Names the training pictures and labels, so that a run is not resumed on others."""
        content = hashlib.sha256(self.train.images.numpy().tobytes())
        content.update(self.train.labels.numpy().tobytes())
        return content.hexdigest()

    def split(self, held_out: int) -> tuple[Digits, Digits]:
        """Training and validation pictures: the last `held_out` choose everything, the test set nothing."""
        count = len(self.train)
        if not 0 < held_out < count:
            raise DataError(
                f"--validation must hold out between 1 and {count - 1} of the {count} training pictures, got {held_out}"
            )
        learn, validation = self.train[: count - held_out], self.train[count - held_out :]
        parts = {
            f"last {held_out} training pictures, which are held out to choose by": validation,
            "others, to learn from": learn,
        }
        for what, part in parts.items():
            for index, name in enumerate(self.classes):
                if not (part.labels == index).any():
                    raise DataError(
                        f"class {name!r} is in none of the {what}; if the files are sorted by class, shuffle them, "
                        "else change how many are held out with --validation"
                    )
        return learn, validation

    @cached_property
    def boxed(self) -> bool:
        """Whether ink was fitted into a box, as MNIST's was: 20 of 28 pixels on its longer side. The service then does so too."""
        images = self.train.images[:SAMPLE]
        if images.shape[1:] != (1, *FRAME):
            return False
        ink = images[:, 0] > 0
        longer = torch.maximum(_extent(ink.any(dim=2)), _extent(ink.any(dim=1)))
        return bool((longer == round(BOX[1] * FRAME[0])).float().mean() > MOST)


def load(dataset: str, folder: Path | None = None) -> DataSet:
    source = chosen("data set", dataset, SOURCES)
    found = find(dataset, folder)
    train = _digits(found, FILES[0], FILES[1], source)
    test = _digits(found, FILES[2], FILES[3], source)
    if train.images.shape[2:] != test.images.shape[2:]:
        raise DataError(f"{found}: training pictures are {_size(train)}, test pictures {_size(test)}; expected one size")
    present = torch.arange(len(source.classes)) if source.classes else train.labels.unique()
    if len(present) < 2:
        raise DataError(f"{found / FILES[1]}: expected at least two classes, found {len(present)}")
    for name, digits in ((FILES[1], train), (FILES[3], test)):
        outside = digits.labels[~torch.isin(digits.labels, present)]
        if len(outside):
            raise DataError(
                f"{found / name}: label {int(outside[0])} is outside the {len(present)} classes"
                + ("" if source.classes else ": no training picture has it")
            )
    classes = source.classes or tuple(str(label) for label in present.tolist())
    train, test = (Digits(each.images, torch.searchsorted(present, each.labels)) for each in (train, test))
    return DataSet(dataset, found, classes, train, test)


def find(dataset: str, folder: Path | None) -> Path:
    """The folder that holds the four files: the one asked for, $CAPSERVE_DATA, or a cache that is filled here."""
    if folder is not None:
        return _held(folder, dataset)
    if shared := os.environ.get("CAPSERVE_DATA"):
        if dataset == "folder":
            return _held(Path(shared), dataset)
        held = _holding(Path(shared), dataset)
        if held and (held.name == dataset or not _of_another(held, dataset)):
            return held
    if dataset == "folder":
        raise DataError("data set 'folder' needs to be told where: pass --data DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "capserve" / dataset
    return _holding(cache, dataset) or download(SOURCES[dataset], cache)


def download(source: Source, folder: Path) -> Path:
    """The four files from the first mirror that answers, each checked before it gets its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        target = folder / f"{name}.gz"
        if target.exists():
            continue
        failures = []
        for mirror in source.mirrors:
            try:
                packed = _fetch(f"{mirror}{name}.gz")
                check(_unpack(packed, target), packed, name, source, origin=f"{mirror}{name}.gz")
            except (OSError, http.client.HTTPException, DataError) as error:
                failures.append(f"{mirror}: {error}")
                continue
            partial = target.with_suffix(f".{os.getpid()}.part")  # several processes may train
            partial.write_bytes(packed)
            partial.replace(target)
            break
        else:
            raise DataError(f"could not download {name}.gz ({'; '.join(failures)}); fetch it by hand and pass --data DIR")
    return folder


def check(unpacked: bytes, packed: bytes | None, name: str, source: Source, origin: str) -> None:
    """The md5 of a known set's file, of the unpacked bytes where that is known, else of the .gz."""
    if source.packed and packed is None:
        raise DataError(f"{origin}: only the published .gz of this data set can be checked; expected {name}.gz")
    for content, is_packed in ((unpacked, False), (packed, True)):
        expected = source.expected(name, is_packed)
        if content is None or expected is None:
            continue
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != expected:
            owner = next((each for each, other in SOURCES.items() if found in other.unpacked + other.packed), None)
            raise DataError(
                f"{origin}: expected md5 {expected}, found {found}; the file is "
                + (
                    f"{owner}'s: pass --data DIR with the right ones"
                    if owner
                    else "damaged or of another data set; files of your own are --dataset folder"
                )
            )


def read_idx(content: bytes, magic: int, origin: Path) -> NDArray[np.uint8]:
    """The array in an idx file: a magic number, big-endian dimensions, then bytes."""
    dimensions = magic & 0xFF
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(f"{origin}: {len(content)} bytes are too few for an idx header of {header}")
    found, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    if found != magic:
        raise DataError(f"{origin}: expected idx magic 0x{magic:08x}, found 0x{found:08x}")
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
    path = _file(folder, name)
    if path is None:
        raise DataError(f"{folder / name}: no such file, nor {name}.gz")
    content = path.read_bytes()
    packed = content if path.suffix == ".gz" else None
    unpacked = content if packed is None else _unpack(packed, path)
    array = read_idx(unpacked, magic, path)  # first, for it says better what is wrong than a checksum does
    check(unpacked, packed, name, source, origin=str(path))
    return array


def _unpack(packed: bytes, origin: Path) -> bytes:
    try:
        return gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{origin}: not a whole gzip file ({error})") from error


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        total = int(response.headers.get("Content-Length") or 0) or None
        chunks = []
        with tqdm(total=total, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[-1]) as bar:
            while chunk := response.read(1 << 16):
                chunks.append(chunk)
                bar.update(len(chunk))
    return b"".join(chunks)


def _holding(folder: Path, dataset: str) -> Path | None:
    """The subfolder named after the data set, or the folder itself, whichever holds all four files."""
    for candidate in (folder / dataset, folder):
        if all(_file(candidate, name) for name in FILES):
            return candidate
    return None


def _held(folder: Path, dataset: str) -> Path:
    found = _holding(folder, dataset)
    if found is None:
        missing = [name for name in FILES if not _file(folder, name)]
        raise DataError(f"{folder}: no {', '.join(missing)} (plain or .gz); expected the four idx files there")
    return found


def _of_another(folder: Path, dataset: str) -> bool:
    """Whether the files are a known set's, and not this one's: all sets call their files the same."""
    path = _file(folder, FILES[3])
    assert path is not None, "the folder holds all four"
    content = path.read_bytes()
    contents = [content, _unpack(content, path)] if path.suffix == ".gz" else [content]
    sums = {hashlib.md5(each, usedforsecurity=False).hexdigest() for each in contents}
    others = [source for name, source in SOURCES.items() if name != dataset]
    return any(sums & {*source.unpacked, *source.packed} for source in others)


def _file(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    return None


def _extent(marked: Tensor) -> Tensor:
    """From the first mark to the last, in pixels: (n, side) -> (n,); all of the side where there is none."""
    side = marked.shape[1]
    first, last = (each.int().argmax(dim=1) for each in (marked, marked.flip(1)))
    return side - first - last


def _size(digits: Digits) -> str:
    return "x".join(str(side) for side in digits.images.shape[2:])
