"""Small random changes that leave the class of a picture the same, for whole batches, on the device that holds them.

Each function takes pictures (batch, C, H, W) in [0, 1] and a generator; none needs labels.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

Augmentation = Callable[[Tensor, Generator], Tensor]

SHIFT = 2  # pixels, in the paper and here


class Limits(NamedTuple):
    """The largest changes, in either direction."""

    rotation: float  # degrees
    scale: float  # fraction
    shear: float  # horizontal tangent


AFFINE = Limits(rotation=12, scale=0.12, shear=0.15)
STRONG = Limits(rotation=18, scale=0.18, shear=0.25)  # about 1.5 times AFFINE: a longer run can still learn from it


def none(images: Tensor, generator: Generator) -> Tensor:
    return images


def shift(images: Tensor, generator: Generator) -> Tensor:
    """Shift by up to two whole pixels in each direction, with zero padding: the only augmentation of Sabour et al. 2017."""
    return moved(images, SHIFT, generator)


def affine(images: Tensor, generator: Generator, limits: Limits = AFFINE) -> Tensor:
    """Rotate, scale, shear and shift by fractions of pixels, in one bilinear sampling."""
    count, _, height, width = images.shape

    def within(limit: float) -> Tensor:
        return (torch.rand(count, generator=generator, device=images.device) * 2 - 1) * limit

    aspect = height / width  # so that the picture is rotated, not the square that affine_grid's coordinates make of it
    angle, slant = within(torch.pi * limits.rotation / 180), within(limits.shear)
    across, down = 1 + within(limits.scale), 1 + within(limits.scale)
    cosine, sine = angle.cos(), angle.sin()
    first = torch.stack([cosine * across, (slant * cosine - sine) * down * aspect, within(2 * SHIFT / width)], dim=1)
    second = torch.stack([sine * across / aspect, (slant * sine + cosine) * down, within(2 * SHIFT / height)], dim=1)
    grid = F.affine_grid(torch.stack([first, second], dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": none,
    "shift": shift,
    "affine": affine,
    "strong": partial(affine, limits=STRONG),
}


def moved(images: Tensor, limit: int, generator: Generator) -> Tensor:
    """Move each picture by whole pixels, up to `limit` in each direction; what leaves the frame is lost."""
    count, channels, height, width = images.shape
    padded = F.pad(images, (limit, limit, limit, limit))
    top, left = torch.randint(0, 2 * limit + 1, (2, count), generator=generator, device=images.device)
    rows = top[:, None] + torch.arange(height, device=images.device)  # (batch, H)
    columns = left[:, None] + torch.arange(width, device=images.device)
    picture = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[picture, channel, rows[:, None, :, None], columns[:, None, None, :]]
