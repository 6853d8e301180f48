"""Makes batches with one digit per picture or two, on the fly from the same data.

A batch says which objects are in each picture and what the decoder should draw for each, so that the same code
trains and evaluates both kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from training.augment import Augmentation, moved, none, shift
from training.data import Digits
from training.errors import DataError, chosen

OVERLAP_SHIFT = 4  # pixels each way in the paper's MultiMNIST: 28x28 digits on 36x36


class Batch(NamedTuple):
    images: Tensor  # (batch, C, H, W) in [0, 1]
    labels: Tensor  # (batch, objects)
    targets: Tensor  # (batch, objects, C, H, W): each object by itself


class Partners:
    """Pictures to pair others with, sorted by class once."""

    def __init__(self, digits: Digits) -> None:
        self.digits = digits

    @cached_property
    def classes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices of pictures sorted by class; the classes present; where each begins in that order; how many pictures it has."""
        order = self.digits.labels.argsort(stable=True)
        present, counts = self.digits.labels.unique(return_counts=True)
        if len(present) < 2:
            raise DataError(f"pairs of different classes need at least two classes, found {len(present)}")
        return order, present, counts.cumsum(0) - counts, counts

    def of_another_class(self, labels: Tensor, generator: Generator) -> Digits:
        """Pick for each label a picture of another class, all other classes equally likely."""
        order, present, starts, counts = self.classes
        step = torch.randint(1, len(present), labels.shape, generator=generator, device=labels.device)
        chosen = (torch.searchsorted(present, labels) + step) % len(present)
        place = torch.rand(labels.shape, generator=generator, device=labels.device)
        return self.digits[order[starts[chosen] + (place * counts[chosen]).long().clamp_max(counts[chosen] - 1)]]


def single(digits: Digits, partners: Partners, augment: Augmentation, generator: Generator) -> Batch:
    images = augment(scaled(digits.images), generator)
    return Batch(images, digits.labels.unsqueeze(1), images.unsqueeze(1))


def overlapping(digits: Digits, partners: Partners, augment: Augmentation, generator: Generator) -> Batch:
    """Sabour et al. 2017, section 6: two digits of different classes on one 36x36 canvas, each shifted up to 4 pixels."""
    augment = none if augment is shift else augment  # both are shifted below anyway
    margin = (OVERLAP_SHIFT,) * 4
    both = _paired(digits, partners, augment, generator)
    moves = [moved(F.pad(images, margin), OVERLAP_SHIFT, generator) for images, _ in both]
    return _pair_batch((moves[0] + moves[1]).clamp_max(1.0), moves, [labels for _, labels in both])


def side_by_side(digits: Digits, partners: Partners, augment: Augmentation, generator: Generator) -> Batch:
    """Su 2018: two digits of different classes next to each other, on a canvas twice as wide."""
    (left, label), (right, other) = _paired(digits, partners, augment, generator)
    width = left.shape[-1]
    places = [F.pad(left, (0, width)), F.pad(right, (width, 0))]
    return _pair_batch(places[0] + places[1], places, [label, other])


Arrange = Callable[[Digits, Partners, Augmentation, Generator], Batch]


@dataclass(frozen=True)
class Arrangement:
    arrange: Arrange
    objects: int
    canvas: Callable[[int, int], tuple[int, int]]  # height and width of one digit -> of the picture
    boxed: bool = True  # whether both lie in the central box that the service fits ink into


ARRANGEMENTS: dict[str, Arrangement] = {
    "none": Arrangement(single, 1, lambda height, width: (height, width)),
    "overlapping": Arrangement(overlapping, 2, lambda height, width: (height + 2 * OVERLAP_SHIFT, width + 2 * OVERLAP_SHIFT)),
    "side_by_side": Arrangement(side_by_side, 2, lambda height, width: (height, 2 * width), boxed=False),
}


def arrangement(name: str) -> Arrangement:
    return chosen("kind of pairs", name, ARRANGEMENTS)


def scaled(images: Tensor) -> Tensor:
    """Scale bytes, as in the files, to [0, 1]."""
    return images.float() / 255.0


def _paired(digits: Digits, partners: Partners, augment: Augmentation, generator: Generator) -> list[tuple[Tensor, Tensor]]:
    """The pictures and their partners, both augmented, each with its labels."""
    others = partners.of_another_class(digits.labels, generator)
    return [(augment(scaled(each.images), generator), each.labels) for each in (digits, others)]


def _pair_batch(images: Tensor, both: list[Tensor], labels: list[Tensor]) -> Batch:
    return Batch(images, torch.stack(labels, dim=1), torch.stack(both, dim=1))
