import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training import drawn
from training.data import DataSet, load
from training.errors import DataError
from training.sources import find

# Networks of the tests are small: one thread is faster than two that wait for each other, here and in child processes.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four idx files of drawn digits."""
    return drawn.write(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="session")
def data(folder: Path) -> DataSet:
    return load("folder", folder)


@pytest.fixture(scope="session")
def boxed(data: DataSet) -> DataSet:
    """The same with ink from the fifth row to the last but four, as MNIST has it, or from column to column."""
    images = torch.zeros_like(data.train.images)
    images[:, :, 4:24, 4:24] = data.train.images[:, :, 4:24, 4:24]
    images[::2, :, [4, 23], 14] = 255
    images[1::2, :, 14, [4, 23]] = 255
    return replace(data, train=replace(data.train, images=images))


@pytest.fixture(scope="session")
def mnist() -> DataSet:
    """The real one, where $CAPSERVE_DATA says it lies; nothing is downloaded for a test."""
    where = os.environ.get("CAPSERVE_DATA")
    if not where:
        pytest.skip("MNIST is not here: set CAPSERVE_DATA to the folder with its four files")
    try:
        return load("mnist", find("mnist", Path(where)))
    except DataError as error:
        pytest.skip(f"MNIST is not in CAPSERVE_DATA: {error}")
