"""The training loop: epochs of steps, a validation after each, a checkpoint that goes on to the same numbers.

Every random choice is drawn from the seed and the step alone, so a resumed run needs no generator state
and a CPU run repeats bit for bit. Nothing here reads the test set.
"""

from __future__ import annotations

import csv
import io
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from training import checkpoint as checkpoints
from training.augment import AUGMENTATIONS
from training.average import Average
from training.checkpoint import Checkpoint
from training.config import Config
from training.data import DataSet
from training.devices import DTYPES, Place, compiles, hardware, precision
from training.errors import CheckpointError, DataError, DivergedError, StoppedError, chosen
from training.evaluate import TorchModel, evaluate, fixed_batches, hits, objects
from training.losses import LOSSES, reconstruction
from training.networks import Network, transforms
from training.pairs import Batch, Partners, arrangement
from training.schedules import SCHEDULES

SUMS = ("loss", "errors", "seen")  # over the pictures of the epoch under way
THEN = ", then "  # between the machines that a run was on
REPORT_EVERY = 20  # steps between looks at the loss, which on a GPU each wait for it


def fitted(config: Config, data: DataSet) -> Config:
    """The config with the picture size and classes of the data it is to learn."""
    channels, height, width = data.train.images.shape[1:]
    pairs = arrangement(config.training.pairs)
    if len(data.classes) <= pairs.objects:
        raise DataError(
            f"pictures of {pairs.objects} objects want more classes than that to choose from, found {len(data.classes)}"
        )
    shape = (channels, *pairs.canvas(height, width))
    return replace(config, network=replace(config.network, image_shape=shape, classes=len(data.classes)))


def train(config: Config, data: DataSet, out: Path, place: Place, resume: bool = False) -> Checkpoint:
    """Trains `config` into the folder `out`; with `resume`, from where the checkpoint there stands."""
    out.mkdir(parents=True, exist_ok=True)
    config = fitted(config, data)
    if resume:
        start = checkpoints.resumable(out, config, data.digest, place.world)
    elif (out / checkpoints.FILE).exists():
        raise CheckpointError(f"{out} already holds a run; pass --resume to go on with it, or choose another --out")
    else:
        start = Checkpoint(config, data.classes, data.digest, processes=place.world)
    place.wait()  # all have looked before the leader writes
    torch.use_deterministic_algorithms(place.device.type == "cpu")
    run = Run(start, data, out, place)
    if run.ended and place.leads:
        print(f"{out} is already at epoch {config.training.all_epochs} of {config.training.all_epochs}: evaluate or export it")
    elif (here := hardware(place.device, place.world)) not in start.hardware.split(THEN):
        start.hardware = THEN.join(filter(None, (start.hardware, here)))
    with _signals(run):
        run.to_the_end()
    if run.stopping and not run.ended:
        raise StoppedError(f"stopped at step {start.step}; go on with the same command and --resume")
    return start


class Run:
    """One training run under way in one process."""

    def __init__(self, start: Checkpoint, data: DataSet, out: Path, place: Place) -> None:
        settings = start.config.training
        self.checkpoint, self.settings, self.out, self.place = start, settings, out, place
        learn, self.validation = data.split(settings.validation)
        self.learn = learn.to(place.device)
        self.partners = Partners(self.learn)
        self.steps_per_epoch = math.ceil(len(self.learn) / settings.batch_size)
        start.precision = start.precision or precision(settings.precision, place.device)  # of the run, wherever it goes on
        self.dtype = DTYPES[start.precision]
        self.augment = chosen("augmentation", settings.augment, AUGMENTATIONS)
        self.loss = chosen("loss", settings.loss, LOSSES)
        self.schedule = chosen("schedule", settings.schedule, SCHEDULES)
        self.arrange = arrangement(settings.pairs).arrange
        self.asked = False  # of this process, to stop
        self.stopping = False  # all processes agreed to

        torch.manual_seed(settings.seed)
        self.network = Network(start.config.network).to(place.device)
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack this form
        self.optimizer = torch.optim.Adam(self._groups(), lr=settings.learning_rate, fused=True)
        self.average = Average(self.network, settings.ema) if settings.ema else None
        if start.network:
            self._restore()
        self.model: Any = self.network
        if place.device.type == "cuda" and compiles():
            self.network.compile()
        elif place.device.type == "cuda" and place.leads:
            print("no C compiler found (gcc or clang): training goes on without torch.compile, more slowly")
        if place.world > 1:
            self.model = DistributedDataParallel(self.network)

    def _groups(self) -> list[dict[str, Any]]:
        """The weights by how fast they learn: Adam's steps are as long for all, and transformations are the largest matrices."""
        if self.settings.transform_rate == 1:
            return [{"params": list(self.network.parameters())}]
        votes = transforms(self.network)
        others = [weights for weights in self.network.parameters() if not any(weights is each for each in votes)]
        return [{"params": others}, {"params": votes, "factor": self.settings.transform_rate}]

    @property
    def ended(self) -> bool:
        return self.checkpoint.step >= self.settings.all_epochs * self.steps_per_epoch

    def to_the_end(self) -> None:
        state = self.checkpoint
        while not (self.ended or self.stopping):
            began, seconds = time.perf_counter(), state.seconds
            self._epoch()
            state.seconds = seconds + time.perf_counter() - began
            if state.step % self.steps_per_epoch == 0:
                self._close_epoch()
            if self.place.leads:
                self._save()
        self.place.wait()

    def _epoch(self) -> None:
        """The rest of the epoch under way: all of it, or what a stop left."""
        state, size = self.checkpoint, self.settings.batch_size
        epoch, done = divmod(state.step, self.steps_per_epoch)
        order = torch.randperm(len(self.learn), generator=self._generator(epoch, purpose="order")).to(self.place.device)
        before = [state.running.get(key, 0.0) if self.place.leads else 0.0 for key in SUMS]
        sums = torch.tensor(before, device=self.place.device)
        self.network.train()
        title = f"epoch {epoch + 1}/{self.settings.all_epochs}"
        with tqdm(
            total=len(order), initial=done * size, unit="img", desc=title, disable=not self.place.leads, leave=False
        ) as bar:
            for number in range(done, self.steps_per_epoch):
                picked = order[number * size : (number + 1) * size]
                sums += self._step(picked)
                state.step += 1
                bar.update(len(picked))
                looks = number % REPORT_EVERY == 0
                if looks:
                    loss, errors, seen = self.place.total(sums)
                    self._check(loss)
                    bar.set_postfix(loss=f"{loss / seen:.4f}", accuracy=f"{100 - 100 * errors / seen:.2f}%")
                if (looks or self.place.world == 1) and self.place.any(self.asked):
                    self.stopping = True
                    break
        state.running = dict(zip(SUMS, self.place.total(sums), strict=True))
        self._check(state.running["loss"])

    def _step(self, picked: Tensor) -> Tensor:
        """One update of the weights by this process's share of a batch; gives the share's (summed loss, errors, pictures)."""
        state = self.checkpoint
        share = picked[self.place.rank :: self.place.world]
        batch = self._batch(share if len(share) else picked[:1])  # too few for all: the others wait for this one's gradient
        count = len(share)
        cycle = self.settings.epochs * self.steps_per_epoch
        rate = self.schedule(state.step % cycle / cycle, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rate * group.get("factor", 1.0)
        with torch.autocast(self.place.device.type, self.dtype, enabled=self.dtype != torch.float32):
            encoding, drawings = self.model(batch.images, batch.labels)
        loss = self.loss(encoding.lengths, batch.labels)
        loss = loss + self.settings.reconstruction * reconstruction(drawings, batch.targets)
        self.optimizer.zero_grad()
        (loss * (count * self.place.world / len(picked))).backward()  # DDP averages over processes, we over pictures
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.network, state.step)
        found = objects(encoding.lengths.detach(), batch.labels.shape[1])
        return torch.stack([loss.detach() * count, (~hits(found, batch.labels))[:count].sum(), loss.new_tensor(count)])

    def _batch(self, picked: Tensor) -> Batch:
        state = self.checkpoint
        torch.manual_seed(self._seed(state.step, purpose="dropout"))
        generator = self._generator(state.step, purpose="augment", device=self.place.device)
        batch = self.arrange(self.learn[picked], self.partners, self.augment, generator)
        return batch._replace(images=batch.images.contiguous(memory_format=torch.channels_last))

    def _close_epoch(self) -> None:
        """Validate, and write the epoch's row into the history."""
        state = self.checkpoint
        running, state.running = state.running, {}
        if not self.place.leads:
            return
        network = self.network if self.average is None else self.average.network
        batches = fixed_batches(self.validation, self.settings.pairs)
        measured = evaluate(TorchModel(network, self.place.device), batches, state.config.network.classes)
        seconds = state.seconds - sum(row["seconds"] for row in state.history)
        row = {
            "epoch": state.step // self.steps_per_epoch,
            "loss": running["loss"] / running["seen"],
            "training_error": 100 * running["errors"] / running["seen"],
            "validation_error": measured.error,
            "validation_reconstruction_error": measured.reconstruction_error,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "seconds": seconds,
        }
        state.history.append(row)
        self._show(row)
        tqdm.write(
            f"epoch {row['epoch']}/{self.settings.all_epochs}  loss {row['loss']:.4f}  "
            f"training error {row['training_error']:.2f} %  validation error {row['validation_error']:.2f} %  "
            f"{len(self.learn) / seconds:.0f} images/s"
        )

    def _show(self, row: dict[str, float]) -> None:
        """The same row for TensorBoard; a resumed run's file replaces what an earlier one wrote past the checkpoint."""
        epoch = int(row["epoch"])
        with SummaryWriter(str(self.out / "tensorboard"), purge_step=epoch) as writer:
            for key, value in row.items():
                writer.add_scalar(key, value, epoch)

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            self._diverged(f"the loss is {loss}")

    def _diverged(self, what: str) -> NoReturn:
        kept = self.out / checkpoints.FILE
        hint = f"the last good checkpoint is {kept}" if kept.exists() else "there is no checkpoint yet"
        raise DivergedError(
            f"{what} at step {self.checkpoint.step}; {hint}. Resumed it would come to the same: start anew in another --out with "
            "a lower --learning-rate" + (" or --transform-rate" if self.settings.transform_rate > 1 else "")
        )

    def _save(self) -> None:
        """Never over a good checkpoint with weights that are no numbers: their loss may not have been seen yet."""
        state = self.checkpoint
        if not all(bool(weights.isfinite().all()) for weights in self.network.parameters()):
            self._diverged("a weight is no finite number")
        state.network = self.network.state_dict()
        state.average = self.average.network.state_dict() if self.average is not None else {}
        state.optimizer = self.optimizer.state_dict()
        checkpoints.save(state, self.out)
        _write_history(state.history, self.out)

    def _restore(self) -> None:
        state = self.checkpoint
        checkpoints.fill(self.network, state.network)
        checkpoints.fill(self.optimizer, state.optimizer)
        if self.average is not None:
            checkpoints.fill(self.average.network, state.average)

    def _seed(self, number: int, purpose: str) -> int:
        """A seed of its own for each epoch's order and each step's dropout and augmentation."""
        kinds = ("order", "dropout", "augment")
        rank = 0 if purpose == "order" else self.place.rank
        numbers = (self.settings.seed, number, kinds.index(purpose), rank)
        mixed = 0
        for value in numbers:
            mixed = (mixed * 0x9E3779B97F4A7C15 + value + 1) % 2**63
        return mixed

    def _generator(self, number: int, purpose: str, device: torch.device | None = None) -> torch.Generator:
        return torch.Generator(device or torch.device("cpu")).manual_seed(self._seed(number, purpose))


def _write_history(history: list[dict[str, float]], out: Path) -> None:
    """history.csv, whole, from the checkpoint's own rows: resuming writes none twice."""
    if not history:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, history[0].keys())
    writer.writeheader()
    writer.writerows(history)
    checkpoints.write_atomically(out / "history.csv", text.getvalue().encode())


@contextmanager
def _signals(run: Run) -> Iterator[None]:
    """SIGINT and SIGTERM end the run after the step under way, with a checkpoint; a second one ends it at once."""

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: object) -> None:
        run.asked = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
