"""What blots on a sheet are like: how wide their strokes are, what hangs together, what lies around. Knows no light."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from service.bundle import Array

Mask = NDArray[np.bool_]
Places = NDArray[np.intp]

DIRT = 0.04  # of the longest blot: what is shorter


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


def components(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers the connected parts, diagonals included; 0 is outside. Each run of pixels in a row points to the first of the runs
    that it hangs together with, till all agree."""
    height, width = mask.shape
    framed = np.zeros((height, width + 2), np.int8)
    framed[:, 1:-1] = mask
    stride = width + 1  # a gap after each row, so that runs can be compared by one number
    steps = np.diff(framed, axis=1).ravel()
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
    names = np.cumsum(root == np.arange(len(root)))[root]  # whose root is itself is the first of its blot
    numbers = np.zeros(mask.shape, np.int64)
    numbers[mask] = np.repeat(names, ends - starts)
    return numbers


def stroke_width(ink: Array | NDArray[np.bool_]) -> float:
    """A stroke w wide and l long has the area w l and the outline 2 l, whose length is what neighbours differ by."""
    framed = np.pad(ink.astype(np.float32), 1)
    down, across = np.diff(framed, axis=0)[:, 1:], np.diff(framed, axis=1)[1:]
    outline = float(np.hypot(down, across).sum())
    return 2 * float(ink.sum()) / max(outline, 1e-6)


class Blots(NamedTuple):
    """Blots of a mask, without dirt: each one's name, its first and last row and column."""

    numbers: NDArray[np.int64]  # (h, w): names of all, 0 outside
    names: Places
    top: Places
    bottom: Places
    left: Places
    right: Places

    @classmethod
    def of(cls, numbers: NDArray[np.int64]) -> Self:
        marked = np.flatnonzero(numbers)
        found = numbers.ravel()[marked]
        many = int(found.max()) + 1
        firsts, lasts = np.full((2, many), max(numbers.shape), np.intp), np.full((2, many), -1, np.intp)
        for first, last, places in zip(firsts, lasts, divmod(marked, numbers.shape[1]), strict=True):
            np.minimum.at(first, found, places)
            np.maximum.at(last, found, places)
        (top, left), (bottom, right) = firsts, lasts
        longer = np.maximum(bottom - top, right - left) + 1
        clean = np.flatnonzero(longer > DIRT * longer.max())
        return cls(numbers, clean, top[clean], bottom[clean], left[clean], right[clean])

    @property
    def width(self) -> Places:
        return self.right - self.left + 1

    @property
    def height(self) -> Places:
        return self.bottom - self.top + 1

    @property
    def longest(self) -> int:
        return int(np.maximum(self.width, self.height).max(initial=0))

    def some(self, chosen: Mask) -> Self:
        return type(self)(self.numbers, *(each[chosen] for each in self[1:]))
