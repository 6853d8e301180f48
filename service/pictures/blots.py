"""What blots on a sheet are like: how wide their strokes are, what hangs together, what lies around. Knows no light."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from service.bundle import Array

Mask = NDArray[np.bool_]
Places = NDArray[np.intp]

FEW = 300  # runs of pixels: so many are named sooner one by one
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


def between(mask: Mask) -> Mask:
    """Of each row what lies between its first and its last marked pixel, with both."""
    return np.logical_or.accumulate(mask, axis=1) & np.logical_or.accumulate(mask[:, ::-1], axis=1)[:, ::-1]


def crossings(mask: Mask) -> Places:
    """How many strokes each row meets."""
    met: Places = np.count_nonzero(mask[:, 1:] & ~mask[:, :-1], axis=1) + mask[:, 0]
    return met


def components(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers the connected parts, diagonals included; 0 is outside."""
    height, width = mask.shape
    stride = width + 1  # a gap beside each row, so that runs can be compared by one number
    framed = np.zeros(height * stride + 2, bool)
    framed[1:-1].reshape(height, stride)[:, :-1] = mask
    starts, ends = (framed[1:] != framed[:-1]).nonzero()[0].reshape(-1, 2).T  # runs of pixels in a row
    # Of each run the first that it touches above, and the one behind the last.
    first, last = ends.searchsorted(starts - stride), starts.searchsorted(ends - stride, side="right")
    root = (_few_rooted if len(starts) < FEW else _many_rooted)(first, last)
    names = np.cumsum(root == np.arange(len(root)))[root]  # whose root is itself is the first of its blot
    numbers = np.zeros(mask.shape, np.int64)
    numbers[mask] = names.repeat(ends - starts)
    return numbers


def _few_rooted(first: Places, last: Places) -> Places:
    """Of each run the first of its blot, where each touches the runs from `first` to before `last`, one by one."""
    root = list(range(len(first)))
    for run, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        least = run
        for other in range(begin, end):
            while root[other] != other:
                root[other] = root[root[other]]  # a shorter way for the next
                other = root[other]
            least, later = min(least, other), max(least, other)
            root[later] = least
    for run, above in enumerate(root):
        root[run] = root[above]
    return np.array(root, np.intp)


def _many_rooted(first: Places, last: Places) -> Places:
    """The same, all runs at a time: each points to the first of the runs that it hangs together with, till all agree."""
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
