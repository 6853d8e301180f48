"""The pixels of a picture by how bright they are: which level parts ink from paper, how far the ink departs. Knows no blots.

Sorting all pixels once is faster than np.median, np.percentile and np.histogram, each of which looks at them anew. np.partition,
which sorts less, takes ten times as long where most are alike, as on a clean sheet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.bundle import Array

BINS = 64  # of a histogram of light
FAINTEST = 0.06  # of full scale: what departs from the paper by less is no ink
FAINT = 0.6  # of the threshold that parts ink from paper: what is printed or drawn as a line may be this pale
OFF = 0.2  # of the ink's strength: what departs by more is not paper
PALEST = 0.15  # of the ink's strength: what departs by less is paper
CLEAR, TAIL = 4, 1.5  # times as far as paper departs from itself, ink does; times as many pixels, where there is none, half do
DIAGONAL = math.sqrt(3)  # of a colour cube of side 1
EXTREME = 8000  # pixels of which one may be brighter than the ink


def lightness(colours: Array) -> Array:
    """(h, w, 3 or 1) -> (h, w) in [0, 1]. Grey alone comes as far along the diagonal of the colour cube as its colour lies."""
    if colours.shape[2] == 1:
        return colours[..., 0] * np.float32(1 / DIAGONAL)
    return (colours[..., 0] + colours[..., 1] + colours[..., 2]) * np.float32(1 / 3)  # not mean: slow along so short an axis


def quantile(levels: Array, part: float) -> float:
    """Of levels in ascending order, the one that this part of them, from 0 to 1, lies below."""
    place = part * (len(levels) - 1)
    low, high = float(levels[math.floor(place)]), float(levels[math.ceil(place)])
    return low + (high - low) * (place % 1)


def median(values: Array) -> float:
    return quantile(np.sort(values, axis=None), 0.5)


def otsu(levels: Array) -> float:
    """The threshold that parts levels, in ascending order, into the two most different groups."""
    low, span = float(levels[0]), max(float(levels[-1] - levels[0]), 1e-6)
    edges = low + span / BINS * np.arange(BINS + 1)
    bounds = np.searchsorted(levels, edges.astype(levels.dtype))
    bounds[0], bounds[-1] = 0, len(levels)
    below, above = bounds[1:], len(levels) - bounds[1:]
    sums = np.cumsum((bounds[1:] - bounds[:-1]) * (edges[:-1] + edges[1:]) / 2)
    between = below * above * (sums / np.maximum(below, 1) - (sums[-1] - sums) / np.maximum(above, 1)) ** 2
    best = edges[1:][between >= between.max() * (1 - 1e-9)]
    return float(best.mean())


@dataclass(frozen=True)
class Departure:
    """How far each pixel departs from the paper, along the line through colour space to the ink."""

    line: Array  # (h, w)
    framed: bool = False  # what is left is what a frame encloses
    lined: bool = False  # or what stands on a line or above it
    ruled: bool = False  # there were rules from edge to edge

    @cached_property
    def levels(self) -> Array:
        return np.sort(self.line, axis=None)

    @cached_property
    def threshold(self) -> float:
        """What parts ink from paper, where both are there; a few pixels that shine do not move it."""
        return otsu(np.clip(self.levels, 0, quantile(self.levels, 0.998)))

    @cached_property
    def strength(self) -> float:
        """How far the ink departs: all but a few pixels by less."""
        few = max(4, self.line.size // EXTREME)
        return float(self.levels[-few if few < self.line.size else -1])

    @cached_property
    def grain(self) -> float:
        """The standard deviation of the sheet's own noise: what neighbours usually differ by, whatever shadows and strokes do."""
        if self.line.size == 1:
            return 0.0
        steps = [np.abs(np.diff(self.line, axis=axis)).ravel() for axis in (0, 1)]
        return 1.05 * median(np.concatenate(steps))

    @cached_property
    def unevenness(self) -> float:
        """By what paper departs from itself, whatever the reason: a standard deviation, but for the ink that there is."""
        return 1.48 * median(np.abs(self.levels[: self._up_to(self.threshold)]))

    @cached_property
    def safe_threshold(self) -> float:
        """Of little ink, the groups that the threshold parts are halves of the noise, or of paper that is the same to a bit."""
        sure = min(5 * max(self.unevenness, self.grain), 0.3 * self.strength)
        return max(self.threshold, 2.5 * self.unevenness, PALEST * self.strength, sure)

    @cached_property
    def noisy(self) -> bool:
        """Whether what departs most is the tail of what the paper does, so that more pixels do half as much: ink has few such."""
        strong = self.levels[self._up_to(self.safe_threshold) :]
        if not len(strong) or quantile(strong, 0.5) >= CLEAR * self.unevenness:
            return False
        half = len(self.levels) - self._up_to(self.safe_threshold / 2)
        return bool(half - len(strong) > TAIL * len(strong))

    def _up_to(self, level: float) -> int:
        """How many pixels depart by no more."""
        return int(np.searchsorted(self.levels, np.float32(level), side="right"))  # of a float64 NumPy would copy them all

    @property
    def written(self) -> bool:
        """Whether there is ink at all, and not noise alone."""
        return self.strength >= max(FAINTEST, 5 * self.grain)
