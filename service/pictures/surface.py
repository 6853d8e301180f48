"""A quadratic surface through colours: paper lit by a lamp, or with corners darkened by a lens. Knows nothing about ink."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import Array
from service.pictures.levels import median

Real = NDArray[np.float64]

NEAR = 0.08  # distance in a colour cube of side 1 that still counts as the same paper


def terms(y: Real, x: Real) -> Real:
    """(n,), (n,) -> (n, 6): the terms that the surface is a sum of, at these places."""
    return np.column_stack([np.ones_like(x), x, y, x * y, x * x, y * y])


def fitted(surface: Real, places: Real, colours: Real) -> Real:
    """(6, channels), terms (n, 6), (n, channels) -> (6, channels): least squares, repeated without what lies far off."""
    near = np.zeros(len(colours), bool)
    for _ in range(4):
        off, before = distance(colours, places @ surface), near
        near = off <= max(NEAR / 2, 2.5 * median(off))
        if np.array_equal(near, before):
            break
        weighted = places[near]
        # A slight preference for a flat surface, in case these pixels leave the slope open.
        normal = weighted.T @ weighted + np.diag([0, 1, 1, 1, 1, 1]) * 1e-3 * len(weighted)
        surface = np.linalg.solve(normal, weighted.T @ colours[near]).astype(np.float64)
    return surface


def drawn(surface: Real, y: Real, x: Real) -> Array:
    """(6, channels), (h,), (w,) -> (h, w, channels): each column a parabola, all channels of a row side by side."""
    one, along, down, both, bow, sag = surface.astype(np.float32)  # each (channels,)
    across, rows = x.astype(np.float32)[:, None], y.astype(np.float32)[:, None]
    level = (one + along * across + bow * across * across).ravel()  # (w * channels,)
    slope = (down + both * across).ravel()
    picture: Array = level + rows * (slope + rows * np.tile(sag, len(x)))
    return picture.reshape(len(y), len(x), -1)


def distance(colours: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """(n, channels), the same or (channels,) -> (n,). Faster than a norm along so short an axis."""
    apart = colours - others
    far: NDArray[Any] = np.sqrt(np.einsum("nc,nc->n", apart, apart))
    return far
