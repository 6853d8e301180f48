"""MNIST's test digits, for tests that need real ones; they lie in $CAPSERVE_DATA and never in this repository."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray


class Digits(NamedTuple):
    images: NDArray[np.uint8]  # (n, 28, 28)
    labels: NDArray[np.uint8]  # (n,)


def load() -> Digits:
    folder = os.environ.get("CAPSERVE_DATA")
    if not folder:
        pytest.skip("needs MNIST: set CAPSERVE_DATA to a folder with its four idx files")
    names = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    try:
        paths = [next(path for path in (Path(folder) / name, Path(folder) / f"{name}.gz") if path.exists()) for name in names]
    except StopIteration:
        pytest.skip(f"needs MNIST: no {' and '.join(names)} in $CAPSERVE_DATA")
    pixels, labels = (gzip.decompress(path.read_bytes()) if path.suffix else path.read_bytes() for path in paths)
    return Digits(np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28), np.frombuffer(labels, np.uint8, offset=8))
