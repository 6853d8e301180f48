"""What blots on a sheet are like: where ink begins, how wide its strokes are, what hangs together. Knows no pictures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

FAINTEST = 0.06  # of full scale: what departs from the paper by less is no ink


def strength(line: Array) -> float:
    """How far the ink departs from the paper: all but a few pixels by less."""
    few = max(4, line.size // 2000)
    return float(np.partition(line.ravel(), -few)[-few]) if few < line.size else float(line.max())


def grain(line: Array) -> float:
    """The standard deviation of a sheet's own noise: what neighbours usually differ by, which no shadow and no stroke changes."""
    steps = [np.abs(np.diff(line, axis=axis)).ravel() for axis in (0, 1)]
    return 1.05 * float(np.median(np.concatenate(steps))) if line.size > 1 else 0.0


def otsu(values: Array) -> float:
    """The threshold that parts the values into the two most different groups."""
    counts, edges = np.histogram(values, bins=64)
    middles = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)
    above = below[-1] - below
    sums = np.cumsum(counts * middles)
    with np.errstate(divide="ignore", invalid="ignore"):
        between = np.nan_to_num(below * above * (sums / below - (sums[-1] - sums) / above) ** 2)
    best = np.flatnonzero(between >= between.max() * (1 - 1e-9))
    return float(edges[1:][best].mean())


def components(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers the connected parts, diagonals included; 0 is outside. Every pixel points to a lower neighbour till all agree."""
    index = np.zeros(mask.shape, np.int64)
    count = int(mask.sum())
    index[mask] = np.arange(1, count + 1)
    pairs = [
        (index[1:], index[:-1]),
        (index[:, 1:], index[:, :-1]),
        (index[1:, 1:], index[:-1, :-1]),
        (index[1:, :-1], index[:-1, 1:]),
    ]
    first, second = (np.concatenate([pair[side][(pair[0] > 0) & (pair[1] > 0)] for pair in pairs]) for side in (0, 1))
    root = np.arange(count + 1)
    while True:
        lower = np.minimum(root[first], root[second])
        before = root.copy()
        np.minimum.at(root, root[first], lower)
        np.minimum.at(root, root[second], lower)
        root = root[root]
        if np.array_equal(before, root):
            break
    _, numbers = np.unique(root, return_inverse=True)
    return numbers[index]


def stroke_width(ink: Array | NDArray[np.bool_]) -> float:
    """A stroke w wide and l long has the area w l and the outline 2 l, whose length is what neighbours differ by."""
    framed = np.pad(ink.astype(np.float32), 1)
    down, across = np.diff(framed, axis=0)[:, 1:], np.diff(framed, axis=1)[1:]
    outline = float(np.hypot(down, across).sum())
    return 2 * float(ink.sum()) / max(outline, 1e-6)
