"""The training loop: epochs of steps, a validation after each, and a checkpoint that resumes with the same results.

Every random choice depends on the seed, the step and the process's rank alone, so a resumed run needs no generator state,
and a CPU run repeats bit for bit with the same number of threads. Nothing here reads the test set.
"""

from __future__ import annotations

import csv
import io
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from service.manifest import MANIFEST
from training import checkpoint as checkpoints
from training.augment import AUGMENTATIONS
from training.checkpoint import Checkpoint
from training.config import CapsuleNet, Config, Training
from training.data import DataSet
from training.devices import Place, hardware, precision, software
from training.errors import CheckpointError, DataError, DivergedError, StoppedError, chosen
from training.evaluate import TorchModel, evaluate, fixed_batches
from training.learner import Learner
from training.losses import LOSSES
from training.pairs import Batch, Partners, arrangement
from training.routing import ROUTINGS
from training.schedules import SCHEDULES

PURPOSES = ("order", "dropout", "augment")  # of random numbers
SUMS = ("loss", "errors", "seen")  # over the pictures of the current epoch so far
SEPARATOR = ", then "  # joins the names of machines, and of versions, that a run was on
REPORT_EVERY = 20  # steps between looks at the loss, each of which, on a GPU, waits for it


def expect_known(config: Config) -> None:
    """Raise for unknown names before any pictures are looked for, since those may have to be downloaded first."""
    settings, network = config.training, config.network
    chosen("augmentation", settings.augment, AUGMENTATIONS)
    chosen("loss", settings.loss, LOSSES)
    chosen("schedule", settings.schedule, SCHEDULES)
    arrangement(settings.pairs)
    precision(settings.precision, torch.device("cpu"))
    if isinstance(network, CapsuleNet):
        chosen("routing", network.routing, ROUTINGS)


def fitted(config: Config, data: DataSet) -> Config:
    """The config with the picture size and classes of the data it is to learn."""
    channels, height, width = data.train.images.shape[1:]
    pairs = arrangement(config.training.pairs)
    if len(data.classes) <= pairs.objects:
        raise DataError(
            f"pictures of {pairs.objects} objects need more classes than that to choose from, found {len(data.classes)}"
        )
    shape = (channels, *pairs.canvas(height, width))
    return replace(config, network=replace(config.network, image_shape=shape, classes=len(data.classes)))


def train(config: Config, data: DataSet, out: Path, place: Place, resume: bool = False) -> Checkpoint:
    """Train `config` into the folder `out`; with `resume`, continue from the checkpoint there."""
    config = fitted(config, data)
    if (out / MANIFEST).exists():
        raise CheckpointError(f"{out} holds a bundle, and runs go into folders of their own; choose another --out")
    if resume:
        start = checkpoints.resumable(out, config, data, place.world)
    elif (out / checkpoints.FILE).exists():
        raise CheckpointError(f"{out} already holds a run; pass --resume to continue it, or choose another --out")
    else:
        start = Checkpoint(config, data.classes, data.digest, processes=place.world)
    torch.use_deterministic_algorithms(place.device.type == "cpu")
    # Deterministic algorithms also fill all new memory with NaN, a waste since each step overwrites it anyway.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch's stubs lack it
    run = Run(start, data, out, place)  # before mkdir, so that invalid settings leave no folder
    place.wait()  # until all have looked into the folder, before the leader writes
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"could not make the folder {out}: {error.strerror}; choose another --out") from error
    if place.leads:
        recipe = ", ".join(f"{name} {value}" for name, value in asdict(config.training).items() if name != "precision")
        print(f"{config.preset} in {start.precision}: {recipe}")
        learned, held_out = len(run.training), len(run.validation)
        print(f"{len(data.classes)} classes: {learned:,} pictures to learn from, {held_out:,} held out to choose by")
        if held_out > learned:
            print("more pictures are held out than there are to learn from: hold out fewer, with --validation")
    if place.leads and data.dark_on_light:
        print(f"the pictures in {data.folder} look dark on light: training fills borders with 0, so store 255 - x")
    if run.finished and place.leads:
        print(f"{out} is already at epoch {config.training.all_epochs} of {config.training.all_epochs}: evaluate or export it")
        _write_history(start.history, out)  # a kill right after the last checkpoint leaves a row out
    else:
        start.hardware = _appended(start.hardware, hardware(place.device, place.world))
        start.software = _appended(start.software, software())
    with checkpoints.locked(out) if place.leads else nullcontext(), _stop_on_signals(run):
        run.train_to_end()
    if run.stopping and not run.finished:
        raise StoppedError(f"stopped at step {start.step}; continue with the same command and --resume")
    return start


def _appended(before: str, here: str) -> str:
    return before if here in before.split(SEPARATOR) else SEPARATOR.join(filter(None, (before, here)))


class Run:
    """One training run in one process: its epochs, and what it leaves on disk."""

    def __init__(self, start: Checkpoint, data: DataSet, out: Path, place: Place) -> None:
        settings = start.config.training
        self.checkpoint, self.settings, self.out, self.place = start, settings, out, place
        training, self.validation = data.split(settings.validation)
        self.training = training.to(place.device)
        self.partners = Partners(self.training)
        self.augment = chosen("augmentation", settings.augment, AUGMENTATIONS)
        self.arrange = arrangement(settings.pairs).arrange
        self.steps_per_epoch = math.ceil(len(self.training) / settings.batch_size)
        start.precision = start.precision or precision(settings.precision, place.device)  # the same wherever the run resumes
        self.learner = Learner(start, place)
        self.stop_requested = False  # this process has been asked to stop
        self.stopping = False  # all processes have agreed to stop

    @property
    def finished(self) -> bool:
        return self.checkpoint.step >= self.settings.all_epochs * self.steps_per_epoch

    def train_to_end(self) -> None:
        state = self.checkpoint
        while not (self.finished or self.stopping):
            began, seconds = time.perf_counter(), state.seconds
            self._train_epoch()
            state.seconds = seconds + time.perf_counter() - began
            epoch_complete = state.step % self.steps_per_epoch == 0
            if epoch_complete:
                self._close_epoch()
            if self.place.leads:
                self._save()
                if epoch_complete:
                    self._show_in_tensorboard(state.history[-1])
        self.place.wait()

    def _train_epoch(self) -> None:
        """Train the rest of the current epoch: all of it, or what a stop left."""
        state, size = self.checkpoint, self.settings.batch_size
        epoch, done = divmod(state.step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(_seed(self.settings, "order", epoch))
        order = torch.randperm(len(self.training), generator=generator).to(self.place.device)
        before = [state.running.get(key, 0.0) if self.place.leads else 0.0 for key in SUMS]
        sums = torch.tensor(before, device=self.place.device)
        self.learner.network.train()
        title = f"epoch {epoch + 1}/{self.settings.all_epochs}"
        with tqdm(
            total=len(order), initial=done * size, unit="img", desc=title, disable=not self.place.leads, leave=False
        ) as bar:
            for number in range(done, self.steps_per_epoch):
                picked = order[number * size : (number + 1) * size]
                sums += self._step(picked)
                state.step += 1
                bar.update(len(picked))
                reports = number % REPORT_EVERY == 0
                if reports:
                    loss, errors, seen = self.place.total(sums)
                    self._check_loss(loss)
                    bar.set_postfix(loss=f"{loss / seen:.4f}", accuracy=f"{100 - 100 * errors / seen:.2f}%")
                if (reports or self.place.world == 1) and self.place.any(self.stop_requested):
                    self.stopping = True
                    break
        state.running = dict(zip(SUMS, self.place.total(sums), strict=True))
        self._check_loss(state.running["loss"])

    def _step(self, picked: Tensor) -> Tensor:
        """Update the weights with this process's share of a batch; returns the share's (summed loss, errors, pictures)."""
        step, place = self.checkpoint.step, self.place
        share = picked[place.rank :: place.world]
        batch = self._batch(share if len(share) else picked[:1])  # no share: the others still wait for a gradient
        count, cycle = len(share), self.settings.epochs * self.steps_per_epoch
        weight = count * place.world / len(picked)  # DDP averages over processes, we over pictures
        loss, right = self.learner.step(batch, step, progress=step % cycle / cycle, weight=weight)
        return torch.stack([loss * count, (~right)[:count].sum(), loss.new_tensor(count)])

    def _batch(self, picked: Tensor) -> Batch:
        settings, step, place = self.settings, self.checkpoint.step, self.place
        torch.manual_seed(_seed(settings, "dropout", step, place.rank))
        generator = torch.Generator(place.device).manual_seed(_seed(settings, "augment", step, place.rank))
        batch = self.arrange(self.training[picked], self.partners, self.augment, generator)
        return batch._replace(images=batch.images.contiguous(memory_format=torch.channels_last))

    def _close_epoch(self) -> None:
        """Validate, and write the epoch's row into the history."""
        state = self.checkpoint
        running, state.running = state.running, {}
        if not self.place.leads:
            return
        batches = fixed_batches(self.validation, self.settings.pairs)
        measured = evaluate(TorchModel(self.learner.result, self.place.device), batches, state.config.network.classes)
        seconds = state.seconds - sum(row["seconds"] for row in state.history)
        row = {
            "epoch": state.step // self.steps_per_epoch,
            "loss": running["loss"] / running["seen"],
            "training_error": 100 * running["errors"] / running["seen"],
            "validation_error": measured.error,
            "validation_reconstruction_error": measured.reconstruction_error,
            "learning_rate": self.learner.rate,
            "seconds": seconds,
        }
        state.history.append(row)
        tqdm.write(
            f"epoch {row['epoch']}/{self.settings.all_epochs}  loss {row['loss']:.4f}  "
            f"training error {row['training_error']:.2f} %  validation error {row['validation_error']:.2f} %  "
            f"{len(self.training) / seconds:.0f} images/s"
        )

    def _show_in_tensorboard(self, row: dict[str, float]) -> None:
        """Write the row for TensorBoard too; a resumed run's file replaces what an earlier one wrote past the checkpoint."""
        epoch = int(row["epoch"])
        try:
            with SummaryWriter(str(self.out / "tensorboard"), purge_step=epoch) as writer:
                for key, value in row.items():
                    writer.add_scalar(key, value, epoch)
        except OSError as error:  # such as a full disk; the checkpoint is written already, and holds this row too
            tqdm.write(f"epoch {epoch} is not shown in TensorBoard: {error}")

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            self._raise_diverged(f"the loss is {loss}")

    def _raise_diverged(self, reason: str) -> NoReturn:
        last_good = self.out / checkpoints.FILE
        hint = f"the last good checkpoint is {last_good}" if last_good.exists() else "there is no checkpoint yet"
        raise DivergedError(
            f"{reason} at step {self.checkpoint.step}; {hint}. Resuming would end the same: start anew in another --out with "
            "a lower --learning-rate"
            + (" or --transform-rate" if self.settings.transform_rate > 1 else "")
            + (" or --muon" if self.settings.muon else "")
        )

    def _save(self) -> None:
        """Save, but never replace a good checkpoint by weights that are not finite: no loss may have shown it yet."""
        state = self.checkpoint
        if not self.learner.finite:
            self._raise_diverged("a weight is not finite")
        self.learner.store(state)
        checkpoints.save(state, self.out)
        _write_history(state.history, self.out)


def _seed(settings: Training, purpose: str, number: int, rank: int = 0) -> int:
    """A separate seed for each epoch's order, the same for all processes, and for each step's dropout and augmentation."""
    mixed = 0
    for value in (settings.seed, number, PURPOSES.index(purpose), rank):
        mixed = (mixed * 0x9E3779B97F4A7C15 + value + 1) % 2**63
    return mixed


def _write_history(history: list[dict[str, float]], out: Path) -> None:
    """Rewrite history.csv from the checkpoint's rows, so that resuming writes none twice."""
    if not history:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, history[0].keys())
    writer.writeheader()
    writer.writerows(history)
    checkpoints.write_atomically(out / "history.csv", text.getvalue().encode())


@contextmanager
def _stop_on_signals(run: Run) -> Iterator[None]:
    """SIGINT and SIGTERM end the run with a checkpoint after the current step; a second one ends it at once.

    Several processes end after the next step at which they look at the loss, so that all end together.
    """

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: object) -> None:
        run.stop_requested = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
