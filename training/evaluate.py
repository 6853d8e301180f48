"""Evaluates a network: its error with an interval and by class, confusions, and how well it draws.

The same code serves torch networks, ONNX bundles, validation during training and `captrain evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from training.augment import Augmentation, none
from training.data import Digits
from training.networks import Encoding, Network
from training.pairs import Batch, Partners, arrangement

PICTURES_AT_ONCE = 32  # pictures: a network that was trained in small batches for lack of memory has none for many
Z_95 = 1.959964  # two-sided 95 % of a normal distribution


class Model(Protocol):
    """An encoder and a decoder, whatever runs them; arguments and results are tensors on the CPU."""

    def classify(self, images: Tensor) -> Encoding: ...

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor: ...


class TorchModel:
    """A network as a Model: evaluation mode, no gradients, float32."""

    def __init__(self, network: Network, device: torch.device | None = None) -> None:
        self.network = network.eval()
        self.device = device or torch.device("cpu")

    def classify(self, images: Tensor) -> Encoding:
        with torch.inference_mode():
            return encoded_in_parts(
                lambda some: Encoding(*(part.cpu() for part in self.network.encoder(some.to(self.device)))), images
            )

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
        with torch.inference_mode():
            drawings: Tensor = self.network.decoder(poses.to(self.device), classes.to(self.device))
            return drawings.cpu()


def encoded_in_parts(encode: Callable[[Tensor], Encoding], images: Tensor) -> Encoding:
    """Encode all of the pictures (n, C, H, W), a few at a time."""
    parts = [encode(some) for some in images.split(PICTURES_AT_ONCE)]
    return Encoding(*(torch.cat(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Evaluation:
    count: int
    errors: int
    confusion: Tensor  # (classes, classes): rows are true, columns predicted; only for one object per picture
    reconstruction_error: float  # mean squared error per pixel between the picture and what its longest capsules draw

    @property
    def error(self) -> float:
        """In per cent, as the literature gives it."""
        return 100.0 * self.errors / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the error, in per cent, which holds for few errors too."""
        n, p = self.count, self.errors / self.count
        centre, spread = p + Z_95**2 / (2 * n), Z_95 * (p * (1 - p) / n + Z_95**2 / (4 * n * n)) ** 0.5
        scale = 100.0 / (1 + Z_95**2 / n)
        return max(0.0, (centre - spread) * scale), min(100.0, (centre + spread) * scale)

    def report(self, classes: tuple[str, ...]) -> str:
        """The lines `captrain evaluate` prints."""
        low, high = self.interval
        lines = [
            f"error {self.error:.2f} % ({self.errors} of {self.count}; 95 % interval {low:.2f} to {high:.2f})",
            f"reconstruction error {self.reconstruction_error:.5f} (mean squared, a pixel)",
        ]
        if self.confusion.sum():
            lines += ["", "class: errors, then what they were taken for"]
            for index, name in enumerate(classes):
                row = self.confusion[index]
                others = [other for other in row.argsort(descending=True).tolist() if other != index and row[other] > 0]
                mistaken_for = [f"{classes[other]} x{int(row[other])}" for other in others]
                lines.append(f"  {name:>12}: {int(row.sum() - row[index]):4d} of {int(row.sum())}  {', '.join(mistaken_for)}")
        return "\n".join(lines)


def evaluate(model: Model, batches: Iterable[Batch], classes: int) -> Evaluation:
    count = errors = 0
    squared = 0.0
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    for batch in batches:
        encoding = model.classify(batch.images)
        predicted = objects(encoding.lengths, batch.labels.shape[1])
        errors += int((~hits(predicted, batch.labels)).sum())
        count += len(batch.images)
        squared += float((draw(model, encoding.capsules, predicted) - batch.images).square().mean(dim=(1, 2, 3)).sum())
        if batch.labels.shape[1] == 1:
            confusion.index_put_((batch.labels[:, 0], predicted[:, 0]), torch.ones(1, dtype=torch.int64), accumulate=True)
    return Evaluation(count, errors, confusion, squared / count)


def objects(lengths: Tensor, count: int) -> Tensor:
    """The classes of the longest capsules, (batch, count)."""
    return lengths.topk(count, dim=1).indices


def hits(predicted: Tensor, labels: Tensor) -> Tensor:
    """A picture is right when exactly its objects are found, in any order: (batch,)."""
    return (predicted.sort(dim=1).values == labels.sort(dim=1).values).all(dim=1)


def poses_of(capsules: Tensor, classes: Tensor) -> Tensor:
    """Select from capsules (batch, classes, pose) those of some classes (batch, objects): (batch, objects, pose)."""
    return torch.take_along_dim(capsules, classes.unsqueeze(-1), dim=1)


def drawings_of(model: Model, capsules: Tensor, classes: Tensor) -> Tensor:
    """Draw each of these objects by itself: (batch, objects, C, H, W)."""
    flat = model.reconstruct(poses_of(capsules, classes).flatten(0, 1), classes.flatten())
    drawings: Tensor = flat.unflatten(0, classes.shape)
    return drawings


def draw(model: Model, capsules: Tensor, classes: Tensor) -> Tensor:
    """Draw what the network believes it saw: the drawings of all objects laid over each other."""
    return drawings_of(model, capsules, classes).sum(dim=1).clamp_max(1.0)


def fixed_batches(digits: Digits, pairs: str, size: int = 250, augment: Augmentation = none, seed: int = 0) -> Iterator[Batch]:
    """Yield every picture once and in order, by default unaltered, with the same partners and changes on each call."""
    generator = torch.Generator().manual_seed(seed)
    arrange, partners = arrangement(pairs).arrange, Partners(digits)
    for start in range(0, len(digits), size):
        yield arrange(digits[start : start + size], partners, augment, generator)
