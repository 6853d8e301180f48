import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import onnx
import pytest
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from service import bundle
from tests.sharing import made_once
from tests.training import drawn
from training import graphs
from training.checkpoint import Checkpoint
from training.config import PRESETS, CapsuleNet, PlainNet
from training.data import DataSet, load
from training.devices import Place
from training.errors import DataError
from training.export import export
from training.networks import Network
from training.sources import find
from training.train import train

# Networks of the tests are small: one thread is faster than two that wait for each other, here and in child processes.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

Drawing = Callable[[Network, CapsuleNet | PlainNet], onnx.ModelProto]


@pytest.fixture(scope="session", autouse=True)
def exported_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Export equal networks only once, since torch's exporter takes seconds for each graph.

    It spends a quarter of that time on listing the operators that it knows, which are the same each time: these are cached.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        for name in ("encoder", "decoder"):
            patch.setattr(graphs, f"{name}_graph", _once(getattr(graphs, f"{name}_graph"), name, tmp_path_factory))
        yield


def _once(export: Drawing, part: str, factory: pytest.TempPathFactory) -> Drawing:
    def graph(network: Network, config: CapsuleNet | PlainNet) -> onnx.ModelProto:
        content = hashlib.sha256(f"{part} {config}".encode())
        for name, values in getattr(network, part).state_dict().items():
            content.update(name.encode() + values.numpy().tobytes())
        return onnx.load(made_once(f"{content.hexdigest()}.onnx", lambda file: onnx.save(export(network, config), file), factory))

    return graph


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four idx files of drawn digits."""
    return drawn.write(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="session")
def data(folder: Path) -> DataSet:
    return load("folder", folder)


@pytest.fixture(scope="session")
def boxed(data: DataSet) -> DataSet:
    """The same with ink from the fifth row to the fifth last, as in MNIST, or between the same columns."""
    images = torch.zeros_like(data.train.images)
    images[:, :, 4:24, 4:24] = data.train.images[:, :, 4:24, 4:24]
    images[::2, :, [4, 23], 14] = 255
    images[1::2, :, 14, [4, 23]] = 255
    return replace(data, train=replace(data.train, images=images))


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """The folder of the real MNIST, found by $CAPSERVE_DATA; nothing is downloaded for a test."""
    where = os.environ.get("CAPSERVE_DATA")
    if not where:
        pytest.skip("MNIST is not here: set CAPSERVE_DATA to the folder with its four files")
    try:
        return find("mnist", Path(where))
    except DataError as error:
        pytest.skip(f"MNIST is not in CAPSERVE_DATA: {error}")


@pytest.fixture(scope="session")
def mnist(mnist_folder: Path) -> DataSet:
    return load("mnist", mnist_folder)


@pytest.fixture(scope="session")
def finished(data: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same run as in test_cli.py, so that graphs, of equal weights, are exported only once."""
    training = replace(PRESETS["tiny"].training, dataset="folder", validation=60, epochs=2, batch_size=20)
    return train(replace(PRESETS["tiny"], training=training), data, tmp_path_factory.mktemp("run"), Place(torch.device("cpu")))


@pytest.fixture(scope="session")
def said() -> list[str]:
    """The messages of the export of `shapes`."""
    return []


@pytest.fixture(scope="session")
def shapes(finished: Checkpoint, data: DataSet, said: list[str], tmp_path_factory: pytest.TempPathFactory) -> bundle.Bundle:
    return export(finished, data, tmp_path_factory.mktemp("models") / "shapes", quantised=True, say=said.append)
