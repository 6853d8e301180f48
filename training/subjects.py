"""A run or a bundle, opened as something to measure and to draw: its config, its data, its models by name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service import bundle
from service.bundle import MANIFEST, Bundle
from training import checkpoint, graphs
from training.config import Config
from training.data import DataSet, load
from training.errors import CheckpointError, DataError, TrainingError
from training.evaluate import Model, TorchModel
from training.export import write_graphs
from training.runtime import OnnxModel
from training.train import fitted


@dataclass(frozen=True)
class Subject:
    config: Config
    classes: tuple[str, ...]
    history: Sequence[dict[str, float]]
    models: dict[str, Model]  # by what runs them: torch, fp32, int8
    bundle: Bundle | None

    def data(self, folder: Path | None) -> DataSet:
        return fitting(self.config, self.classes, folder)


def fitting(config: Config, classes: tuple[str, ...], folder: Path | None) -> DataSet:
    """The data set that a network was trained on, or one of the same classes and picture size."""
    found = load(config.training.dataset, folder)
    if found.classes != classes:
        raise DataError(f"expected pictures of the classes {', '.join(classes)}, found {', '.join(found.classes)}")
    expected, actual = config.network.image_shape, fitted(config, found).network.image_shape
    if expected != actual:
        raise DataError(f"expected pictures that make inputs of {expected}, found {actual}")
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


def expect_seeds_of_one_bundle(subjects: Sequence[Subject]) -> None:
    """What may be recorded together: a bundle, then finished runs of its config from other seeds."""
    first, *runs = subjects
    if first.bundle is None:
        raise TrainingError("--record writes into the manifest of a bundle: expected a bundle as the first, found a run")
    seeds = [subject.config.training.seed for subject in subjects]
    if len(set(seeds)) < len(seeds):
        raise TrainingError(f"expected runs of different seeds, found the seeds {', '.join(map(str, seeds))}")
    for run in runs:
        parted = [each for each in first.config.differences(run.config) if not each.startswith("training.seed:")]
        if parted:
            raise TrainingError(f"expected runs that differ from the bundle in their seed alone, found {'; '.join(parted)}")
        if len(run.history) < run.config.training.all_epochs:
            raise TrainingError(
                f"expected a run of {run.config.training.all_epochs} epochs, found {len(run.history)}: finish it first"
            )


def _bundle(path: Path) -> Subject:
    read = bundle.read(path)
    manifest = read.manifest
    models: dict[str, Model] = {}
    for variant in manifest.variants:
        models[variant] = model = OnnxModel(read.encoder(variant), read.decoder)
        model.check(manifest)
    return Subject(Config.from_dict(manifest.config), manifest.classes, manifest.training.history, models, read)


def _run(path: Path, aside: Path) -> Subject:
    state = checkpoint.load(path)
    network = state.restored()
    models: dict[str, Model] = {"torch": TorchModel(network)}
    models.update(write_graphs(graphs.storable(network), state, aside, calibration=None).items())
    return Subject(state.config, state.classes, state.history, models, None)
