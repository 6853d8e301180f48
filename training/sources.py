"""Finds or downloads data sets: MNIST, Fashion-MNIST, KMNIST, and any folder of four such files or of pictures.

Looks in the folder asked for or, if none is, in $CAPSERVE_DATA, then in a cache that it fills from public mirrors; checks
known sets' files, and opens no pictures.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

from training.errors import DataError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
PARTS = ("train", "test")  # of a folder of pictures, each with a subfolder for each class


@dataclass(frozen=True)
class Source:
    """A known data set: its class names, where to download it, the md5 of its four files in the order of FILES."""

    classes: tuple[str, ...]
    mirrors: tuple[str, ...] = ()
    unpacked_sums: tuple[str, ...] = ()
    packed_sums: tuple[str, ...] = ()  # md5 of the publisher's .gz files, for a set whose unpacked sums are not published

    def expected_sum(self, name: str, packed: bool) -> str | None:
        sums = self.packed_sums if packed else self.unpacked_sums
        return sums[FILES.index(name)] if sums else None


DIGITS = tuple("0123456789")
SOURCES: dict[str, Source] = {
    "mnist": Source(
        DIGITS,
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        unpacked_sums=(
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
    ),
    "fashion": Source(
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        unpacked_sums=(
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
    ),
    "kmnist": Source(
        ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        mirrors=("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
        packed_sums=(
            "bdb82020997e1d708af4cf47b453dcf7",
            "e144d726b3acfaa3e44228e80efcd344",
            "5c965bf0a639b31b8f53240b1b52f4d7",
            "7320c461ea6c1c855c0b718fb2a4b134",
        ),
    ),
    "folder": Source(()),  # idx files, whose classes are named in classes.txt or by their labels, or folders of pictures
}


def find(dataset: str, folder: Path | None) -> Path:
    """Return the folder that holds the data: the one asked for, $CAPSERVE_DATA, or a cache that is filled here."""
    if folder is not None:
        return _data_folder(folder, dataset)
    if shared := os.environ.get("CAPSERVE_DATA"):
        if not Path(shared).is_dir():
            raise DataError(
                f"CAPSERVE_DATA={shared}: expected a folder, found none; correct it, or unset it to download the data"
            )
        if dataset == "folder":
            return _data_folder(Path(shared), dataset)
        idx_folder = _idx_folder(Path(shared), dataset)
        if idx_folder and (idx_folder.name == dataset or not holds_another_set(idx_folder, dataset)):
            return idx_folder
    if dataset == "folder":
        raise DataError("data set 'folder' needs a folder: pass --data DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "capserve" / dataset
    return _idx_folder(cache, dataset) or download(SOURCES[dataset], cache)


def download(source: Source, folder: Path) -> Path:
    """Download the four files, each from the first mirror that has it intact, checked before it gets its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        target = folder / f"{name}.gz"
        if target.exists():
            continue
        failures = []
        for mirror in source.mirrors:
            try:
                packed = _fetch(f"{mirror}{name}.gz")
                check(unpack(packed, target), packed, name, source, origin=f"{mirror}{name}.gz")
            except (OSError, http.client.HTTPException, DataError) as error:
                failures.append(f"{mirror}: {error}")
                continue
            partial = target.with_suffix(f".{os.getpid()}.part")  # several processes may download
            partial.write_bytes(packed)
            partial.replace(target)
            break
        else:
            raise DataError(f"could not download {name}.gz ({'; '.join(failures)}); fetch it by hand and pass --data DIR")
    return folder


def check(unpacked: bytes, packed: bytes | None, name: str, source: Source, origin: str) -> None:
    """Check the md5 of a known set's file: of the unpacked bytes if that is known, else of the .gz."""
    if source.packed_sums and packed is None:
        raise DataError(f"{origin}: only the published .gz of this data set can be checked; expected {name}.gz")
    for content, is_packed in ((unpacked, False), (packed, True)):
        expected = source.expected_sum(name, is_packed)
        if content is None or expected is None:
            continue
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != expected:
            owner = next((each for each, other in SOURCES.items() if found in other.unpacked_sums + other.packed_sums), None)
            raise DataError(
                f"{origin}: expected md5 {expected}, found {found}; the file is "
                + (
                    f"{owner}'s: pass --data DIR with the right ones"
                    if owner
                    else "damaged or of another data set; `captrain train --dataset folder` takes files of your own"
                )
            )


def unpack(packed: bytes, origin: Path) -> bytes:
    try:
        return gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{origin}: not a whole gzip file ({error})") from error


def _fetch(url: str) -> bytes:
    from tqdm import tqdm  # --help must work without it

    with urllib.request.urlopen(url, timeout=30) as response:
        total = int(response.headers.get("Content-Length") or 0) or None
        chunks = []
        with tqdm(total=total, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[-1]) as bar:
            while chunk := response.read(1 << 16):
                chunks.append(chunk)
                bar.update(len(chunk))
    return b"".join(chunks)


def _idx_folder(folder: Path, dataset: str) -> Path | None:
    """The subfolder named after the data set, or the folder itself, whichever holds all four files."""
    for candidate in (folder / dataset, folder):
        if all(file_of(candidate, name) for name in FILES):
            return candidate
    return None


def holds_pictures(folder: Path) -> bool:
    return all((folder / part).is_dir() for part in PARTS) and not any(file_of(folder, name) for name in FILES)


def _data_folder(folder: Path, dataset: str) -> Path:
    idx_folder = _idx_folder(folder, dataset)
    if idx_folder is None and holds_pictures(folder):
        return folder
    if idx_folder is None:
        missing = [name for name in FILES if not file_of(folder, name)]
        raise DataError(
            f"{folder}: no {', '.join(missing)} (plain or .gz); expected the four idx files there, "
            f"or pictures: {PARTS[0]}/ and {PARTS[1]}/ with a subfolder for each class"
        )
    return idx_folder


def holds_another_set(folder: Path, dataset: str) -> bool:
    """Whether the files are those of another known set, since all sets use the same file names."""
    path = file_of(folder, FILES[3])
    assert path is not None, "the folder holds all four"
    content = path.read_bytes()
    contents = [content, unpack(content, path)] if path.suffix == ".gz" else [content]
    sums = {hashlib.md5(each, usedforsecurity=False).hexdigest() for each in contents}
    others = [source for name, source in SOURCES.items() if name != dataset]
    return any(sums & {*source.unpacked_sums, *source.packed_sums} for source in others)


def file_of(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    return None
