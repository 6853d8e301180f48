"""What blots on a sheet are like: where ink begins, how wide its strokes are, what hangs together. Knows no pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import Array

Mask = NDArray[np.bool_]

BINS = 64  # of a histogram of light
FAINTEST = 0.06  # of full scale: what departs from the paper by less is no ink


def strength(line: Array) -> float:
    """How far the ink departs from the paper: all but a few pixels by less."""
    few = max(4, line.size // 8000)
    return float(np.partition(line.ravel(), -few)[-few]) if few < line.size else float(line.max())


def edge(values: NDArray[Any]) -> NDArray[Any]:
    """What lies along the four sides."""
    return np.concatenate([values[0], values[-1], values[:, 0], values[:, -1]])


def extremes(values: Array, window: int, choose: np.ufunc) -> Array:
    """The largest or smallest value in each window of a column. Windows double, so wide ones cost hardly more."""
    seen = 1
    while seen < window:
        step = min(seen, window - seen)
        values = choose(values[:-step], values[step:])
        seen += step
    return values


def grown(mask: Mask) -> Mask:
    """And what is within two pixels of it."""
    wider = mask.copy()
    for _ in range(2):
        wider[1:] |= wider[:-1]
        wider[:-1] |= wider[1:]
        wider[:, 1:] |= wider[:, :-1]
        wider[:, :-1] |= wider[:, 1:]
    return wider


def grain(line: Array) -> float:
    """The standard deviation of a sheet's own noise: what neighbours usually differ by, which no shadow and no stroke changes."""
    steps = [np.abs(np.diff(line, axis=axis)).ravel() for axis in (0, 1)]
    return 1.05 * float(np.median(np.concatenate(steps))) if line.size > 1 else 0.0


def otsu(values: Array) -> float:
    """The threshold that parts the values into the two most different groups."""
    low, span = float(values.min()), max(float(np.ptp(values)), 1e-6)
    bins = ((values.ravel() - low) * (BINS / span)).astype(np.intp)
    counts = np.bincount(np.minimum(bins, BINS - 1), minlength=BINS)  # np.histogram's own checks take longer than the counting
    edges = low + span / BINS * np.arange(BINS + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)
    above = below[-1] - below
    sums = np.cumsum(counts * middles)
    with np.errstate(divide="ignore", invalid="ignore"):
        between = np.nan_to_num(below * above * (sums / below - (sums[-1] - sums) / above) ** 2)
    best = np.flatnonzero(between >= between.max() * (1 - 1e-9))
    return float(edges[1:][best].mean())


def components(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers the connected parts, diagonals included; 0 is outside. Each run of pixels in a row points to the first of the runs
    that it hangs together with, till all agree."""
    numbers = np.zeros(mask.shape, np.int64)
    stride = mask.shape[1] + 1  # a gap after each row, so that runs can be compared by one number
    steps = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1).ravel()
    starts, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    above = np.searchsorted(ends, starts - stride), np.searchsorted(starts, ends - stride, side="right")  # from, to: touched
    touching = above[1] - above[0]
    lower = np.repeat(np.arange(len(starts)), touching)
    upper = np.arange(len(lower)) + np.repeat(above[0] - np.cumsum(touching) + touching, touching)
    root = np.arange(len(starts))
    while True:
        before = root
        first = np.minimum(root[lower], root[upper])
        root = root.copy()
        np.minimum.at(root, before[lower], first)
        np.minimum.at(root, before[upper], first)
        root = root[root]
        if np.array_equal(before, root):
            break
    _, names = np.unique(root, return_inverse=True)
    numbers[mask] = np.repeat(1 + names, ends - starts)
    return numbers


def stroke_width(ink: Array | NDArray[np.bool_]) -> float:
    """A stroke w wide and l long has the area w l and the outline 2 l, whose length is what neighbours differ by."""
    framed = np.pad(ink.astype(np.float32), 1)
    down, across = np.diff(framed, axis=0)[:, 1:], np.diff(framed, axis=1)[1:]
    outline = float(np.hypot(down, across).sum())
    return 2 * float(ink.sum()) / max(outline, 1e-6)
