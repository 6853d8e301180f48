"""A run or a bundle, opened as something to measure and to draw: its config, its data, its models by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from service import bundle
from service.bundle import Bundle
from service.manifest import MANIFEST
from training import checkpoint, graphs
from training.checkpoint import Checkpoint
from training.config import Config
from training.data import ITS_OWN, DataSet, load
from training.errors import CheckpointError, DataError, TrainingError
from training.evaluate import Evaluation, Model, TorchModel, evaluate, fixed_batches
from training.export import write_graphs
from training.runtime import OnnxModel
from training.train import fitted


@dataclass(frozen=True)
class Subject:
    config: Config
    classes: tuple[str, ...]
    history: Sequence[dict[str, float]]
    open_models: Callable[[], dict[str, Model]]
    bundle: Bundle | None
    digest: str | None  # of the training pictures it learned, where that is known

    @cached_property
    def models(self) -> dict[str, Model]:
        """By what runs them: torch, fp32, int8. Not before they are asked for: to export a run takes seconds, a refusal none."""
        return self.open_models()

    def data(self, folder: Path | None, its_own: bool = False) -> DataSet:
        """Pictures to measure it on: `its_own`, or those of any data set of the same classes and size."""
        found = matching_data(self.config, self.classes, folder, any_files=folder is not None and not its_own)
        if its_own:
            found.expect(self.digest)
        return found

    def evaluations(self, data: DataSet) -> Iterator[tuple[str, Evaluation]]:
        """What each model makes of the test pictures."""
        for name, model in self.models.items():
            yield name, evaluate(model, fixed_batches(data.test, self.config.training.pairs), len(data.classes))


def matching_data(config: Config, classes: tuple[str, ...], folder: Path | None, any_files: bool = False) -> DataSet:
    """The data set that a network was trained on, or one of the same classes and picture size."""
    found = load(config.training.dataset, folder, any_files)
    if found.classes != classes:
        raise DataError(
            f"{found.folder}: expected pictures of the classes {', '.join(classes)}, found {', '.join(found.classes)}; {ITS_OWN}"
        )
    expected, actual = config.network.image_shape, fitted(config, found).network.image_shape
    if expected != actual:
        raise DataError(f"{found.folder}: expected pictures that make inputs of {expected}, found {actual}; {ITS_OWN}")
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


def seeds_of_one_bundle(subjects: Sequence[Subject]) -> Bundle:
    """What may be recorded together: a bundle, then runs of its config and pictures from other seeds, all finished."""
    first, *runs = subjects
    if first.bundle is None:
        raise TrainingError("--record writes into the manifest of a bundle: expected a bundle as the first, found a run")
    seeds = [subject.config.training.seed for subject in subjects]
    if len(set(seeds)) < len(seeds):
        raise TrainingError(f"expected runs of different seeds, found the seeds {', '.join(map(str, seeds))}")
    for run in runs:
        parted = [each for each in first.config.differences(run.config) if not each.startswith("training.seed:")]
        if first.digest not in (None, run.digest):
            parted.append("other training pictures")
        if parted:
            raise TrainingError(f"expected runs that differ from the bundle only in their seed, found {'; '.join(parted)}")
    for subject in subjects if runs else ():
        done, asked = len(subject.history), subject.config.training.all_epochs
        if done < asked:
            raise TrainingError(
                f"expected seed {subject.config.training.seed} after {asked} epochs, found {done}: finish it first"
            )
    return first.bundle


def _bundle(path: Path) -> Subject:
    read = bundle.read(path)
    manifest = read.manifest
    return Subject(
        config=Config.from_dict(manifest.config),
        classes=manifest.classes,
        history=manifest.training.history,
        open_models=partial(_bundled, read),
        bundle=read,
        digest=manifest.training.data,
    )


def _bundled(read: Bundle) -> dict[str, Model]:
    models: dict[str, Model] = {}
    for variant in read.manifest.variants:
        models[variant] = model = OnnxModel(read.encoder(variant), read.decoder)
        model.check(read.manifest)
    return models


def _run(path: Path, aside: Path) -> Subject:
    state = checkpoint.load(path)
    return Subject(
        config=state.config,
        classes=state.classes,
        history=state.history,
        open_models=partial(_trained, state, aside),
        bundle=None,
        digest=state.digest,
    )


def _trained(state: Checkpoint, aside: Path) -> dict[str, Model]:
    network = state.restored()
    models: dict[str, Model] = {"torch": TorchModel(network)}
    models.update(write_graphs(graphs.storable(network), state.config.network, aside, calibration=None).items())
    return models
