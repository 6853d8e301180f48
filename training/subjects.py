"""Opens a run or a bundle to measure it and to draw its figures: its config, its data, its models by name."""

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
from training.data import DATA_HINT, DataSet, load
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
        """By name: torch, fp32, int8; opened when first needed, since exporting a run takes seconds and a refusal should not."""
        return self.open_models()

    def data(self, folder: Path | None, its_own: bool = False) -> DataSet:
        """Load pictures to measure it on: its own or, from a `folder` and without `its_own`, any of the same classes and size."""
        data = matching_data(self.config, self.classes, folder, any_files=folder is not None and not its_own)
        if its_own:
            data.expect(self.digest)
        return data

    def evaluations(self, data: DataSet) -> Iterator[tuple[str, Evaluation]]:
        """Evaluate each model on the test pictures."""
        for name, model in self.models.items():
            yield name, evaluate(model, fixed_batches(data.test, self.config.training.pairs), len(data.classes))


def matching_data(config: Config, classes: tuple[str, ...], folder: Path | None, any_files: bool = False) -> DataSet:
    """Load the data set that a network was trained on or, with `any_files`, one of the same classes and picture size."""
    data = load(config.training.dataset, folder, any_files)
    if data.classes != classes:
        raise DataError(
            f"{data.folder}: expected pictures of the classes {', '.join(classes)}, found {', '.join(data.classes)}; {DATA_HINT}"
        )
    expected, actual = config.network.image_shape, fitted(config, data).network.image_shape
    if expected != actual:
        raise DataError(f"{data.folder}: expected pictures that make inputs of {expected}, found {actual}; {DATA_HINT}")
    return data


@contextmanager
def opened(path: Path) -> Iterator[Subject]:
    """Open a run on torch and, exported to a temporary folder, on ONNX Runtime; or a bundle on ONNX Runtime, in each variant."""
    if (path / MANIFEST).exists():
        yield _bundle_subject(path)
    elif (path / checkpoint.FILE).exists():
        with tempfile.TemporaryDirectory() as aside:
            yield _run_subject(path, Path(aside))
    else:
        raise CheckpointError(f"{path}: neither a run ({checkpoint.FILE}) nor a bundle ({MANIFEST}) is there")


def seeds_of_one_bundle(subjects: Sequence[Subject]) -> Bundle:
    """Check that a bundle comes first, then runs of its config and pictures from other seeds, all finished; return the bundle."""
    first, *runs = subjects
    if first.bundle is None:
        raise TrainingError("--record writes into the manifest of a bundle: expected a bundle as the first, found a run")
    seeds = [subject.config.training.seed for subject in subjects]
    if len(set(seeds)) < len(seeds):
        raise TrainingError(f"expected runs of different seeds, found the seeds {', '.join(map(str, seeds))}")
    for run in runs:
        differences = [each for each in first.config.differences(run.config) if not each.startswith("training.seed:")]
        if first.digest not in (None, run.digest):
            differences.append("other training pictures")
        if differences:
            raise TrainingError(f"expected runs that differ from the bundle only in their seed, found {'; '.join(differences)}")
    for subject in subjects if runs else ():
        done, planned = len(subject.history), subject.config.training.all_epochs
        if done < planned:
            raise TrainingError(
                f"expected seed {subject.config.training.seed} after {planned} epochs, found {done}: finish it first"
            )
    return first.bundle


def _bundle_subject(path: Path) -> Subject:
    model_bundle = bundle.read(path)
    manifest = model_bundle.manifest
    return Subject(
        config=Config.from_dict(manifest.config),
        classes=manifest.classes,
        history=manifest.training.history,
        open_models=partial(_bundle_models, model_bundle),
        bundle=model_bundle,
        digest=manifest.training.data,
    )


def _bundle_models(model_bundle: Bundle) -> dict[str, Model]:
    models: dict[str, Model] = {}
    for variant in model_bundle.manifest.variants:
        models[variant] = model = OnnxModel(model_bundle.encoder(variant), model_bundle.decoder)
        model.check(model_bundle.manifest)
    return models


def _run_subject(path: Path, aside: Path) -> Subject:
    state = checkpoint.load(path)
    return Subject(
        config=state.config,
        classes=state.classes,
        history=state.history,
        open_models=partial(_run_models, state, aside),
        bundle=None,
        digest=state.digest,
    )


def _run_models(state: Checkpoint, aside: Path) -> dict[str, Model]:
    network = state.restored()
    models: dict[str, Model] = {"torch": TorchModel(network)}
    models.update(write_graphs(graphs.storable(network), state.config.network, aside, calibration=None).items())
    return models
