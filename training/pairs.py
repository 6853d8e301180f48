"""Batches of one digit a picture, or of two, made on the fly from the same data.

A batch says which objects are in each picture and what the decoder should draw of each, so that one digit
and two are trained and judged by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from training.augment import moved
from training.data import Digits
from training.errors import DataError, UnknownNameError

OVERLAP_SHIFT = 4  # pixels each way in the paper's MultiMNIST: 28x28 digits on 36x36


class Batch(NamedTuple):
    images: Tensor  # (batch, C, H, W) in [0, 1]
    labels: Tensor  # (batch, objects)
    targets: Tensor  # (batch, objects, C, H, W): each object by itself


def single(images: Tensor, labels: Tensor, partners: Digits, generator: Generator) -> Batch:
    return Batch(images, labels.unsqueeze(1), images.unsqueeze(1))


def overlapping(images: Tensor, labels: Tensor, partners: Digits, generator: Generator) -> Batch:
    """Sabour et al. 2017, section 6: two digits of different classes on one 36x36 canvas, each shifted up to 4 pixels."""
    others, their_labels = another_class(labels, partners, generator)
    margin = (OVERLAP_SHIFT,) * 4
    both = [moved(F.pad(digit, margin), OVERLAP_SHIFT, generator) for digit in (images, scaled(others))]
    return _pair((both[0] + both[1]).clamp_max(1.0), both, labels, their_labels)


def side_by_side(images: Tensor, labels: Tensor, partners: Digits, generator: Generator) -> Batch:
    """Su 2018: two digits of different classes next to each other, on a canvas twice as wide."""
    others, their_labels = another_class(labels, partners, generator)
    width = images.shape[-1]
    both = [F.pad(images, (0, width)), F.pad(scaled(others), (width, 0))]
    return _pair(both[0] + both[1], both, labels, their_labels)


@dataclass(frozen=True)
class Arrangement:
    arrange: Callable[[Tensor, Tensor, Digits, Generator], Batch]
    objects: int
    canvas: Callable[[int, int], tuple[int, int]]  # height and width of one digit -> of the picture


ARRANGEMENTS: dict[str, Arrangement] = {
    "none": Arrangement(single, 1, lambda height, width: (height, width)),
    "overlapping": Arrangement(overlapping, 2, lambda height, width: (height + 2 * OVERLAP_SHIFT, width + 2 * OVERLAP_SHIFT)),
    "side_by_side": Arrangement(side_by_side, 2, lambda height, width: (height, 2 * width)),
}


def arrangement(name: str) -> Arrangement:
    if name not in ARRANGEMENTS:
        raise UnknownNameError("kind of pairs", name, ARRANGEMENTS)
    return ARRANGEMENTS[name]


def another_class(labels: Tensor, partners: Digits, generator: Generator) -> tuple[Tensor, Tensor]:
    """For each label a picture of some other class, all classes equally likely."""
    by_class = partners.labels.argsort(stable=True)
    present, counts = partners.labels.unique(return_counts=True)
    if len(present) < 2:
        raise DataError(f"pairs of different classes need at least two classes, found {len(present)}")
    starts = counts.cumsum(0) - counts
    step = torch.randint(1, len(present), labels.shape, generator=generator, device=labels.device)
    chosen = (torch.searchsorted(present, labels) + step) % len(present)
    place = torch.rand(labels.shape, generator=generator, device=labels.device)
    index = by_class[starts[chosen] + (place * counts[chosen]).long().clamp_max(counts[chosen] - 1)]
    return partners.images[index], partners.labels[index]


def scaled(images: Tensor) -> Tensor:
    """Bytes as they lie in the files -> [0, 1]."""
    return images.float() / 255.0


def _pair(images: Tensor, both: list[Tensor], labels: Tensor, their_labels: Tensor) -> Batch:
    return Batch(images, torch.stack([labels, their_labels], dim=1), torch.stack(both, dim=1))
