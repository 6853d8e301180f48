import os
from pathlib import Path

import pytest
import torch

from tests.training import drawn
from training.data import DataSet, find, load
from training.errors import DataError

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
def mnist() -> DataSet:
    """The real one, where $CAPSERVE_DATA says it lies; nothing is downloaded for a test."""
    where = os.environ.get("CAPSERVE_DATA")
    if not where:
        pytest.skip("MNIST is not here: set CAPSERVE_DATA to the folder with its four files")
    try:
        return load("mnist", find("mnist", Path(where)))
    except DataError as error:
        pytest.skip(f"MNIST is not in CAPSERVE_DATA: {error}")
