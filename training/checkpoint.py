"""Saves a run to one file, which is written atomically, and loads it to resume."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from training.config import Config
from training.data import CLASS_NAMES_FILE, DATA_HINT, DataSet
from training.errors import CheckpointError
from training.networks import Network

FILE = "checkpoint.pt"


@dataclass
class Checkpoint:
    """All that a run needs to resume with the same results, and all that a bundle records of how it was made."""

    config: Config
    classes: tuple[str, ...]
    digest: str  # of the training pictures and labels; stored as `data`
    hardware: str = ""  # all machines that the run was on
    software: str = ""  # all versions that it ran with, since versions may round differently
    processes: int = 0  # that share each batch, each with augmentation of its own; 0 if not recorded
    precision: str = ""  # with `auto` resolved where the run began
    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)  # a row per finished epoch
    running: dict[str, float] = field(default_factory=dict)  # sums over the current epoch
    network: dict[str, Any] = field(default_factory=dict)
    average: dict[str, Any] = field(default_factory=dict)  # empty without EMA
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def restored(self) -> Network:
        """The network to use: the averaged weights if the run keeps an average."""
        network = Network(self.config.network)
        fill(network, self.average or self.network)
        return network.eval()


def fill(part: Network | Optimizer, state: dict[str, Any]) -> None:
    try:
        part.load_state_dict(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's weights are not this network's, or another version wrote them: {error}"
        ) from error


def save(checkpoint: Checkpoint, run: Path) -> None:
    """Write to a temporary file, then rename it, so that a full disk or a kill leaves the old checkpoint intact."""
    values = {entry.name: getattr(checkpoint, entry.name) for entry in dataclasses.fields(checkpoint)}
    buffer = io.BytesIO()
    values |= {"config": checkpoint.config.to_dict(), "classes": list(checkpoint.classes), "data": values.pop("digest")}
    torch.save(values, buffer)
    write_atomically(run / FILE, buffer.getbuffer())


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock the folder while a run trains: two runs would overwrite each other's checkpoints."""
    folder = os.open(run, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"another process trains into {run}; wait for it, or choose another --out") from error
        yield
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        kept = "; the one before is whole" if path.exists() else ""
        raise CheckpointError(f"could not write {path}: {error.strerror or error}{kept}") from error


def load(run: Path) -> Checkpoint:
    path = run / FILE
    if not path.exists():
        raise CheckpointError(f"{path}: no checkpoint there; expected a folder that `captrain train --out` has filled")
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        values["config"] = Config.from_dict(values["config"])
        values["classes"] = tuple(values["classes"])
        values["digest"] = values.pop("data")
        values.pop("optimizer", None)  # of runs made when there was only one
        return Checkpoint(**values)
    except Exception as error:  # torch raises a dozen exception types for damaged files
        raise CheckpointError(
            f"{path}: not a checkpoint of this program, or damaged ({type(error).__name__}: {error})"
        ) from error


def resumable(run: Path, config: Config, data: DataSet, processes: int) -> Checkpoint:
    """Return the checkpoint in `run` if it has this config and data; only cycles may be added, since they run after the rest."""
    checkpoint = load(run)
    cycles = max(checkpoint.config.training.cycles, config.training.cycles)
    longer = replace(checkpoint.config, training=replace(checkpoint.config.training, cycles=cycles))
    if different := longer.differences(config):
        raise CheckpointError(
            f"{run / FILE} is of another config ({checkpoint.config.preset}) than asked for ({config.preset}): "
            f"{'; '.join(different)}. Resume with the settings it was started with (only --cycles may grow), "
            "or choose another --out"
        )
    if not checkpoint.optimizers:
        raise CheckpointError(
            f"{run / FILE} was written by an earlier captrain, which stored its optimizer differently: "
            "the run can be exported and measured, but not resumed. Start anew in another --out"
        )
    data.expect(checkpoint.digest)
    if checkpoint.classes != data.classes:
        raise CheckpointError(
            f"{run / FILE} was begun with the classes {', '.join(checkpoint.classes)}, found {', '.join(data.classes)}; "
            f"put {CLASS_NAMES_FILE} back as it was, or {DATA_HINT}"
        )
    if checkpoint.processes not in (0, processes):
        raise CheckpointError(
            f"{run / FILE} was trained by {checkpoint.processes} processes, found {processes}; "
            "another number would give other results: resume with as many"
        )
    return replace(checkpoint, config=longer, processes=processes)
