"""Compares a training step of `paper` with one of the layers of XifengGuo/CapsNet-Pytorch, in turn in one run.

    python -m benchmarks.training_step

Both run without the preset's dropout and with Adam alone. Prints images/s of each and the ratios, for each step and as a median:
the machine may drift, the ratio does not. Freed memory is kept for all of them, as in `captrain train`.
Their formulation is written out below from its description, computing the same in the same way: a vote tensor made by a
broadcast product of (batch, out, in) small matrices, elementwise routing sums, float32, channels first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import PRESETS
from training.convolution import LargeConv2d
from training.devices import DTYPES, hardware, keep_freed_memory, precision
from training.losses import margin, reconstruction
from training.networks import Network
from training.routing import lengths

PAPER = PRESETS["paper"]
BATCH, STEPS, WARM_UP = PAPER.training.batch_size, 5, 2
CPU = torch.device("cpu")


class TheirCapsNet(nn.Module):
    """The public repository's network: (batch, out, in, pose) votes from weights (out, in, pose, size)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 256, 9)
        self.second = nn.Conv2d(256, 256, 9, stride=2)
        self.weight = nn.Parameter(0.01 * torch.randn(10, 1152, 16, 8))
        self.decoder = nn.Sequential(
            nn.Linear(160, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 784), nn.Sigmoid()
        )

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        features = self.second(self.first(images).relu())
        primary = their_squash(features.flatten(1).unflatten(1, (1152, 8)))
        votes = (self.weight @ primary[:, None, :, :, None]).squeeze(-1)  # expands the weights over the batch
        detached, logits = votes.detach(), torch.zeros(len(images), 10, 1152)
        for step in range(3):
            couplings = F.softmax(logits, dim=1)[..., None]
            if step == 2:
                capsules = their_squash((couplings * votes).sum(dim=2, keepdim=True))
            else:
                capsules = their_squash((couplings * detached).sum(dim=2, keepdim=True))
                logits = logits + (capsules * detached).sum(dim=-1)
        capsules = capsules.squeeze(2)
        masked = capsules * F.one_hot(labels[:, 0], 10)[..., None]
        drawings: Tensor = self.decoder(masked.flatten(1))
        return lengths(capsules), drawings.unflatten(1, (1, 1, 28, 28))


def their_squash(vectors: Tensor) -> Tensor:
    norm: Tensor = vectors.norm(dim=-1, keepdim=True)
    return norm**2 / (1 + norm**2) / (norm + 1e-8) * vectors


def ours(dtype: torch.dtype, directly: bool = False) -> Callable[[Tensor, Tensor], None]:
    network = Network(replace(PAPER.network, dropout=0.0))  # the copy has no dropout, which routes a second time
    if directly:
        for part in network.modules():
            if isinstance(part, LargeConv2d):
                part.forward = partial(nn.Conv2d.forward, part)  # type: ignore[method-assign]
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack this form
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def step(images: Tensor, labels: Tensor) -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            encoding, drawings = network(images, labels)
        _update(optimizer, encoding.lengths, drawings, images, labels)

    return step


def theirs() -> Callable[[Tensor, Tensor], None]:
    network = TheirCapsNet()
    optimizer = torch.optim.Adam(network.parameters())

    def step(images: Tensor, labels: Tensor) -> None:
        class_lengths, drawings = network(images, labels)
        _update(optimizer, class_lengths, drawings, images, labels)

    return step


def _update(optimizer: torch.optim.Optimizer, class_lengths: Tensor, drawings: Tensor, images: Tensor, labels: Tensor) -> None:
    loss = margin(class_lengths, labels) + PAPER.training.reconstruction * reconstruction(drawings, images.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    keep_freed_memory()
    images, labels = torch.rand(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH, 1))
    default_dtype = DTYPES[precision("auto", CPU)]
    contenders = {
        "theirs, float32": theirs(),
        "ours, float32, convolved directly": ours(torch.float32, directly=True),
        "ours, float32, convolved by spectra": ours(torch.float32),
    }
    if default_dtype != torch.float32:
        contenders["ours, bfloat16, convolved directly"] = ours(default_dtype, directly=True)
        contenders["ours, bfloat16, convolved by spectra"] = ours(default_dtype)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for count in range(WARM_UP + STEPS):
        for name, step in contenders.items():
            began = time.perf_counter()
            step(images, labels)
            if count >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    base = seconds["theirs, float32"]
    print(f"A training step of `paper`, batch {BATCH}, {torch.get_num_threads()} threads, {hardware(CPU)}")
    for name, own_seconds in seconds.items():
        ratios = [other / own for other, own in zip(base, own_seconds, strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{BATCH / statistics.median(own_seconds):7.0f} images/s  {statistics.median(ratios):5.2f}x  ({each})  {name}")


if __name__ == "__main__":
    main()
