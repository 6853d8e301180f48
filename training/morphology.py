"""Measures of a drawn digit: how thick, slanted, wide, high and round it is, and where it lies.

They are computed from sums over pixels, so they change smoothly with the picture. Morpho-MNIST (Castro et al. 2019)
measures the same things on skeletons, which are not needed here. Independent of networks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-6  # ink of an empty picture, to avoid division by zero


class Spread(NamedTuple):
    """Where the ink of each picture lies and how far it spreads, in pixels."""

    centre_across: Tensor  # (n,), as are all others
    centre_down: Tensor
    variance_across: Tensor
    variance_down: Tensor
    covariance: Tensor
    distance: Tensor  # mean distance from the centre, both directions scaled to a variance of 1


def spread(images: Tensor) -> Spread:  # (n, C, H, W)
    ink = images.clamp_min(0).sum(dim=1)
    ink = ink / (ink.sum(dim=(1, 2), keepdim=True) + TINY)  # (n, H, W), sums to 1
    rows = torch.arange(ink.shape[1], dtype=ink.dtype)[:, None]
    columns = torch.arange(ink.shape[2], dtype=ink.dtype)[None, :]

    def mean(values: Tensor) -> Tensor:
        return (ink * values).sum(dim=(1, 2), keepdim=True)

    across, down = mean(columns), mean(rows)
    right, below = columns - across, rows - down
    wide, high = mean(right.square()) + TINY, mean(below.square()) + TINY
    distance = mean((right.square() / wide + below.square() / high + TINY).sqrt())
    return Spread(*(each.flatten() for each in (across, down, wide, high, mean(right * below), distance)))


def stroke_thickness(images: Tensor) -> Tensor:
    """Twice the ink divided by the length of its outline: a stroke of width w and length l has ink w l and outline 2 l."""
    ink = images.clamp_min(0)
    down, across = ink.diff(dim=2, append=ink[:, :, -1:]), ink.diff(dim=3, append=ink[..., -1:])
    outline = (down.square() + across.square() + TINY**2).sqrt().sum(dim=(1, 2, 3))
    return 2 * ink.sum(dim=(1, 2, 3)) / (outline + TINY)


def slant(images: Tensor) -> Tensor:
    """Pixels to the right for each pixel up: 0 is upright, / is positive."""
    found = spread(images)
    return -found.covariance / found.variance_down


def width(images: Tensor) -> Tensor:
    """Horizontal spread without the part that the slant adds."""
    found = spread(images)
    return (found.variance_across - found.covariance.square() / found.variance_down).clamp_min(TINY).sqrt()


def height(images: Tensor) -> Tensor:
    return spread(images).variance_down.sqrt()


def roundness(images: Tensor) -> Tensor:
    """How far the ink lies from its centre, relative to its size: a ring has 1, a disc 0.94, a straight stroke 0.87."""
    return spread(images).distance / 2**0.5


def position_across(images: Tensor) -> Tensor:
    return spread(images).centre_across


def position_down(images: Tensor) -> Tensor:
    return spread(images).centre_down


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "stroke thickness": stroke_thickness,
    "slant": slant,
    "width": width,
    "height": height,
    "roundness": roundness,
    "position, left to right": position_across,
    "position, up to down": position_down,
}


def measured(images: Tensor) -> Tensor:
    """All measures of each picture: (n, measures)."""
    return torch.stack([measure(images) for measure in MEASURES.values()], dim=1)
