"""A run or a bundle, opened as something to measure and to draw: its config, its data, its models by name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service import bundle
from service.bundle import MANIFEST, Bundle, BundleError
from training import checkpoint, graphs
from training.config import Config
from training.data import DataSet, load
from training.errors import CheckpointError, DataError, TrainingError
from training.evaluate import Model, TorchModel
from training.export import write_graphs
from training.runtime import OnnxModel


@dataclass(frozen=True)
class Subject:
    config: Config
    classes: tuple[str, ...]
    history: Sequence[dict[str, float]]
    models: dict[str, Model]  # by what runs them: torch, fp32, int8
    bundle: Bundle | None

    def data(self, folder: Path | None) -> DataSet:
        """The data set it was trained on; another one has other classes or another picture size."""
        found = load(self.config.training.dataset, folder)
        if found.classes != self.classes:
            raise DataError(f"expected the classes {', '.join(self.classes)}, found {', '.join(found.classes)}")
        return found


@contextmanager
def opened(path: Path) -> Iterator[Subject]:
    """A run runs on torch and, exported aside, on ONNX Runtime; a bundle on ONNX Runtime, in each variant it has."""
    if (path / MANIFEST).exists():
        yield _bundle(path)
    elif (path / checkpoint.FILE).exists():
        with tempfile.TemporaryDirectory() as aside:
            yield _run(path, Path(aside))
    else:
        raise CheckpointError(f"{path}: neither a run ({checkpoint.FILE}) nor a bundle ({MANIFEST}) is there")


def _bundle(path: Path) -> Subject:
    try:
        read = bundle.read(path)
        models: dict[str, Model] = {}
        for variant in read.manifest.variants:
            models[variant] = model = OnnxModel(read.encoder(variant), read.decoder)
            model.check(read.manifest)
    except BundleError as error:
        raise TrainingError(str(error)) from error
    manifest = read.manifest
    return Subject(Config.from_dict(manifest.config), manifest.classes, manifest.training.history, models, read)


def _run(path: Path, aside: Path) -> Subject:
    state = checkpoint.load(path)
    network = state.restored()
    models: dict[str, Model] = {"torch": TorchModel(network)}
    models.update(write_graphs(graphs.storable(network), state, aside, calibration=None).items())
    return Subject(state.config, state.classes, state.history, models, None)
