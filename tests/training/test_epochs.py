"""What a run records of its epochs, with steps that are defined here; and that each of these draws anew."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from training import checkpoint, train
from training.checkpoint import Checkpoint
from training.config import PRESETS
from training.data import DataSet
from training.devices import Place
from training.errors import CheckpointError, DivergedError
from training.learner import Learner
from training.pairs import Batch

Step = tuple[Tensor, Tensor]


def trained(data: DataSet, out: Path, **settings: Any) -> Checkpoint:
    """Train for two epochs of 340 pictures, unless `settings` say otherwise."""
    tiny = PRESETS["tiny"]
    chosen = {"dataset": "folder", "epochs": 2, "validation": 60, "batch_size": 100, **settings}
    return train.train(replace(tiny, training=replace(tiny.training, **chosen)), data, out, Place(torch.device("cpu")))


def test_each_epoch_has_a_row_of_its_own(data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Learner, batch: Batch, number: int, progress: float, weight: float) -> Step:
        return torch.tensor(float(number)), torch.arange(len(batch.images)) >= 10  # ten of each batch are wrong

    monkeypatch.setattr(Learner, "step", step)
    done = trained(data, tmp_path, ema=0.0)
    shares = torch.tensor([100, 100, 100, 40]) / 340
    losses = [float((shares * torch.arange(start, start + 4)).sum()) for start in (0, 4)]
    assert [row["loss"] for row in done.history] == pytest.approx(losses)
    assert [row["training_error"] for row in done.history] == pytest.approx([100 * 40 / 340] * 2)
    assert sum(row["seconds"] for row in done.history) == pytest.approx(done.seconds)


def test_every_epoch_and_step_uses_new_random_numbers(data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    augmented, dropped, orders = [], [], []

    def note(images: Tensor, generator: torch.Generator) -> Tensor:
        augmented.append(generator.initial_seed())
        return images

    def step(self: Learner, batch: Batch, number: int, progress: float, weight: float) -> Step:
        dropped.append(torch.initial_seed())
        orders.append(batch.images.clone())
        return torch.tensor(1.0), torch.ones(len(batch.images), dtype=torch.bool)

    monkeypatch.setattr(Learner, "step", step)
    monkeypatch.setitem(train.AUGMENTATIONS, "affine", note)
    trained(data, tmp_path, batch_size=170, augment="affine")
    assert len(set(augmented)) == len(set(dropped)) == 4
    assert not set(augmented) & set(dropped)  # and each purpose has seeds of its own
    assert not torch.equal(orders[0], orders[2])


def test_the_checkpoint_is_written_before_its_history(data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is missing is written again; a checkpoint cannot be."""

    def full(*_: object) -> None:
        raise CheckpointError("full")

    monkeypatch.setattr(train, "_write_history", full)
    with pytest.raises(CheckpointError, match="full"):
        trained(data, tmp_path, epochs=1)
    assert checkpoint.load(tmp_path).step == 4


def test_a_run_continues_when_tensorboard_finds_the_disk_full(
    data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train, "SummaryWriter", full)
    assert len(trained(data, tmp_path).history) == 2


def test_the_divergence_error_names_every_rate_in_use() -> None:
    settings = SimpleNamespace(transform_rate=2, muon=0.02)
    run: Any = SimpleNamespace(out=Path("/none"), checkpoint=SimpleNamespace(step=1), settings=settings)
    with pytest.raises(DivergedError, match="--learning-rate or --transform-rate or --muon"):
        train.Run._raise_diverged(run, "x")


def test_a_machine_is_recorded_even_if_another_name_ends_with_its_own() -> None:
    assert train._appended("a CPU, 16 cores", "CPU, 16 cores") == f"a CPU, 16 cores{train.SEPARATOR}CPU, 16 cores"
