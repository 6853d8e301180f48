"""A network that learns: its weights, their average, Adam and its rate; a step for a batch.

Knows no data set, no epochs and no files. What it is made of comes out of a checkpoint and goes into one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from training.average import Average
from training.checkpoint import Checkpoint, fill
from training.config import Training
from training.devices import DTYPES, Place, compiles
from training.errors import chosen
from training.evaluate import hits, objects
from training.losses import LOSSES, reconstruction
from training.networks import Network, transforms
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
        self.optimizer = torch.optim.Adam(_groups(self.network, settings), lr=settings.learning_rate, fused=True)
        self.average = Average(self.network, settings.ema) if settings.ema else None
        if start.network:
            self._restore(start)
        self.model = _placed(self.network, place)

    @property
    def result(self) -> Network:
        """The network to use: the averaged weights where an average is kept."""
        return self.network if self.average is None else self.average.network

    @property
    def rate(self) -> float:
        """Of the last step."""
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate

    @property
    def sound(self) -> bool:
        """Whether all weights are numbers."""
        return all(bool(weights.isfinite().all()) for weights in self.network.parameters())

    def step(self, batch: Batch, number: int, progress: float, weight: float) -> tuple[Tensor, Tensor]:
        """One update of the weights: of the run the `number`th, `progress` into its cycle, the batch's loss times `weight`.

        Gives the loss itself, and of each picture whether it was named rightly: (batch,).
        """
        rate = self.schedule(progress, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rate * group.get("factor", 1.0)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            encoding, drawings = self.model(batch.images, batch.labels)
        loss = self.loss(encoding.lengths, batch.labels)
        loss = loss + self.settings.reconstruction * reconstruction(drawings, batch.targets)
        self.optimizer.zero_grad()
        (loss * weight).backward()
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.network, number)
        found = objects(encoding.lengths.detach(), batch.labels.shape[1])
        return loss.detach(), hits(found, batch.labels)

    def store(self, state: Checkpoint) -> None:
        state.network = self.network.state_dict()
        state.average = self.average.network.state_dict() if self.average is not None else {}
        state.optimizer = self.optimizer.state_dict()

    def _restore(self, state: Checkpoint) -> None:
        fill(self.network, state.network)
        fill(self.optimizer, state.optimizer)
        if self.average is not None:
            fill(self.average.network, state.average)


def _groups(network: Network, settings: Training) -> list[dict[str, Any]]:
    """The weights by how fast they learn: Adam's steps are as long for all, and transformations are the largest matrices."""
    if settings.transform_rate == 1:
        return [{"params": list(network.parameters())}]
    votes = transforms(network)
    others = [weights for weights in network.parameters() if not any(weights is each for each in votes)]
    return [{"params": others}, {"params": votes, "factor": settings.transform_rate}]


def _placed(network: Network, place: Place) -> Any:
    """The network as it is called in training: compiled on a GPU, its gradients shared with the other processes."""
    if place.device.type == "cuda" and compiles():
        network.compile()
    elif place.device.type == "cuda" and place.leads:
        print("no C compiler found (gcc or clang): training goes on without torch.compile, more slowly")
    return DistributedDataParallel(network) if place.world > 1 else network
