"""A network in training: its weights, their average, the optimizers and their rates; one step per batch.

Independent of data sets, epochs and files. Its state comes from a checkpoint and is stored in one.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from training.average import Average
from training.checkpoint import Checkpoint, fill
from training.config import Config
from training.devices import DTYPES, Place, can_compile
from training.errors import SettingError, chosen
from training.evaluate import hits, objects
from training.losses import LOSSES, reconstruction
from training.muon import Muon
from training.networks import Network, convolutions, transforms
from training.pairs import Batch
from training.schedules import SCHEDULES


class Learner:
    def __init__(self, start: Checkpoint, place: Place) -> None:
        self.settings = settings = start.config.training
        self.device, self.dtype = place.device, DTYPES[start.precision]
        self.loss = chosen("loss", settings.loss, LOSSES)
        self.schedule = chosen("schedule", settings.schedule, SCHEDULES)
        torch.manual_seed(settings.seed)
        self.network = Network(start.config.network).to(place.device)
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack this form
        self.optimizers = _optimizers(self.network, start.config)
        self.average = Average(self.network, settings.ema) if settings.ema else None
        if start.network:
            self._restore(start)
        self.model = _placed(self.network, place)

    @property
    def result(self) -> Network:
        """The network to use: the averaged weights if an average is kept."""
        return self.network if self.average is None else self.average.network

    @property
    def rate(self) -> float:
        """Adam's learning rate in the last step."""
        rate: float = self.optimizers["adam"].param_groups[0]["lr"]
        return rate

    @property
    def finite(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(weights.isfinite().all()) for weights in self.network.parameters())

    def step(self, batch: Batch, number: int, progress: float, weight: float) -> tuple[Tensor, Tensor]:
        """Update the weights in step `number` of the run, at `progress` of its cycle, with the batch's loss times `weight`.

        Returns the loss itself and, for each picture, whether it was classified correctly: (batch,).
        """
        rate = self.schedule(progress, self.settings)
        for group in chain.from_iterable(each.param_groups for each in self.optimizers.values()):
            group["lr"] = group["highest"] * rate
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            encoding, drawings = self.model(batch.images, batch.labels)
        loss = self.loss(encoding.lengths, batch.labels)
        loss = loss + self.settings.reconstruction * reconstruction(drawings, batch.targets)
        self.network.zero_grad()
        (loss * weight).backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        if self.average is not None:
            self.average.update(self.network, number)
        predicted = objects(encoding.lengths.detach(), batch.labels.shape[1])
        return loss.detach(), hits(predicted, batch.labels)

    def store(self, state: Checkpoint) -> None:
        state.network = self.network.state_dict()
        state.average = self.average.network.state_dict() if self.average is not None else {}
        state.optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def _restore(self, state: Checkpoint) -> None:
        fill(self.network, state.network)
        for name, optimizer in self.optimizers.items():
            fill(optimizer, state.optimizers[name])
        if self.average is not None:
            fill(self.average.network, state.average)


def _optimizers(network: Network, config: Config) -> dict[str, Optimizer]:
    """Adam for all weights, or Muon for matrices and Adam for the rest, with a group for each highest learning rate."""
    settings = config.training
    matrices, kernels = transforms(network), convolutions(network) if settings.muon else []
    special = {id(weights) for weights in (*matrices, *kernels)}
    rest = [weights for weights in network.parameters() if id(weights) not in special]
    base = settings.muon or settings.learning_rate
    matrix_group = {"params": matrices, "highest": base * settings.transform_rate}
    rest_group = {"params": rest, "highest": settings.learning_rate}
    if not settings.muon:
        groups = [rest_group, matrix_group] if matrices else [rest_group]
        return {"adam": torch.optim.Adam(groups, lr=settings.learning_rate, fused=True)}
    groups = [{"params": kernels, "highest": base}, {**matrix_group, "columns": config.network.pose_size}]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise SettingError("muon is for transformations and for convolutions after the first, and there are none: leave it out")
    return {"adam": torch.optim.Adam([rest_group], lr=settings.learning_rate, fused=True), "muon": Muon(groups, lr=settings.muon)}


def _placed(network: Network, place: Place) -> Any:
    """The network to call in training: compiled on a GPU, with gradients shared between processes."""
    if place.device.type == "cuda" and can_compile():
        network.compile()
    elif place.device.type == "cuda" and place.leads:
        print("no C compiler found (gcc or clang): training goes on without torch.compile, more slowly")
    return DistributedDataParallel(network) if place.world > 1 else network
