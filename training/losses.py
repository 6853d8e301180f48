"""Losses: class losses on capsule lengths, and the distance of drawings from pictures."""

from collections.abc import Callable

import torch
from torch import Tensor

PRESENT, ABSENT, ABSENT_WEIGHT = 0.9, 0.1, 0.5  # m+, m- and lambda of Sabour et al. 2017, Eq. 4


def margin(lengths: Tensor, labels: Tensor) -> Tensor:
    """Wants capsules of present classes longer than 0.9, the others shorter than 0.1; any number of objects per picture."""
    present = multi_hot(lengths, labels)
    short = (PRESENT - lengths).relu().square()
    long = (lengths - ABSENT).relu().square()
    return (present * short + ABSENT_WEIGHT * (1 - present) * long).sum(dim=1).mean()


def contrast(lengths: Tensor, labels: Tensor) -> Tensor:
    """The margin loss plus a cross entropy, in which the probability of a class is its capsule's share of the sum of all n^2.

    n is a capsule's length before squash, so n^2 is proportional to length / (1 - length). The margin loss alone hardly moves
    capsules near 0 and 1; this one goes on until the right ones outweigh the others, and at first needs fewer pictures to learn
    the same.
    """
    clamped = lengths.clamp(1e-4, 1 - 1e-4)
    surprise = -(clamped / (1 - clamped)).log().log_softmax(dim=1).gather(1, labels)  # (batch, objects)
    return margin(lengths, labels) + surprise.mean()


def cross_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """For the softmax baseline, whose outputs are probabilities."""
    present = multi_hot(probabilities, labels)
    return -(present * probabilities.clamp_min(1e-8).log()).sum(dim=1).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"margin": margin, "contrast": contrast, "cross_entropy": cross_entropy}


def reconstruction(drawings: Tensor, targets: Tensor) -> Tensor:
    """Squared error between two (batch, objects, C, H, W): summed over pixels and objects, averaged over the batch."""
    return (drawings - targets).square().flatten(1).sum(dim=1).mean()


def multi_hot(lengths: Tensor, labels: Tensor) -> Tensor:
    """Labels (batch, objects) as ones in (batch, classes)."""
    return torch.zeros_like(lengths).scatter(1, labels, 1.0)
