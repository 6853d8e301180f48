"""Measures blots on a sheet: stroke widths, connected parts, what lies around them. Knows nothing about light."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from service.bundle import Array

Mask = NDArray[np.bool_]
Places = NDArray[np.intp]

FEW = 300  # runs of pixels: fewer are named faster one by one
DIRT = 0.04  # of the longest blot: what is shorter is dirt


def edge(values: NDArray[Any]) -> NDArray[Any]:
    """The values along the four sides."""
    return np.concatenate([values[0], values[-1], values[:, 0], values[:, -1]])


def extremes(values: Array, window: int, choose: np.ufunc) -> Array:
    """The largest or smallest value in each window of a column. Windows are doubled, so wide ones cost hardly more."""
    seen = 1
    while seen < window:
        step = min(seen, window - seen)
        values = choose(values[:-step], values[step:])
        seen += step
    return values


def grown(mask: Mask) -> Mask:
    """The mask and what is within two pixels of it."""
    wider = mask.copy()
    for _ in range(2):
        wider[1:] |= wider[:-1]
        wider[:-1] |= wider[1:]
        wider[:, 1:] |= wider[:, :-1]
        wider[:, :-1] |= wider[:, 1:]
    return wider


def between(mask: Mask) -> Mask:
    """In each row, everything from the first to the last marked pixel."""
    return np.logical_or.accumulate(mask, axis=1) & np.logical_or.accumulate(mask[:, ::-1], axis=1)[:, ::-1]


def crossings(mask: Mask) -> Places:
    """How many strokes each row crosses."""
    met: Places = np.count_nonzero(mask[:, 1:] & ~mask[:, :-1], axis=1) + mask[:, 0]
    return met


def components(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers the parts that are connected, also diagonally; 0 is outside."""
    height, width = mask.shape
    stride = width + 1  # a gap after each row, so that runs can be compared by one number
    framed = np.zeros(height * stride + 2, bool)
    framed[1:-1].reshape(height, stride)[:, :-1] = mask
    starts, ends = (framed[1:] != framed[:-1]).nonzero()[0].reshape(-1, 2).T  # runs of pixels in a row
    # For each run, the first one that it touches in the row above, and the one after the last.
    first, last = ends.searchsorted(starts - stride), starts.searchsorted(ends - stride, side="right")
    root = (_few_rooted if len(starts) < FEW else _many_rooted)(first, last)
    names = np.cumsum(root == np.arange(len(root)))[root]  # a run that is its own root is the first of its blot
    numbers = np.zeros(mask.shape, np.int64)
    numbers[mask] = names.repeat(ends - starts)
    return numbers


def _few_rooted(first: Places, last: Places) -> Places:
    """For each run the first one of its blot, if each touches the runs from `first` up to `last`, exclusive; one by one."""
    root = list(range(len(first)))
    for run, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        least = run
        for other in range(begin, end):
            while root[other] != other:
                root[other] = root[root[other]]  # shortens the way for the next run
                other = root[other]
            least, later = min(least, other), max(least, other)
            root[later] = least
    for run, above in enumerate(root):
        root[run] = root[above]
    return np.array(root, np.intp)


def _many_rooted(first: Places, last: Places) -> Places:
    """The same for all runs at once: each points to the first run that it is connected with, until nothing changes."""
    touching = last - first
    lower = np.repeat(np.arange(len(first)), touching)
    upper = np.arange(len(lower)) + np.repeat(first - np.cumsum(touching) + touching, touching)
    root = np.arange(len(first))
    while True:
        before = root
        least = np.minimum(root[lower], root[upper])
        root = root.copy()
        np.minimum.at(root, before[lower], least)
        np.minimum.at(root, before[upper], least)
        root = root[root]
        if np.array_equal(before, root):
            return root


def stroke_width(ink: Array | NDArray[np.bool_]) -> float:
    """A stroke w wide and l long has the area w l and the outline 2 l, which is the sum of what neighbours differ by."""
    framed = np.pad(ink.astype(np.float32), 1)
    down, across = np.diff(framed, axis=0)[:, 1:], np.diff(framed, axis=1)[1:]
    outline = float(np.hypot(down, across).sum())
    return 2 * float(ink.sum()) / max(outline, 1e-6)


class Blots(NamedTuple):
    """The blots of a mask, without dirt: the name of each, its first and last row and column."""

    numbers: NDArray[np.int64]  # (h, w): names of all, dirt included; 0 outside
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
