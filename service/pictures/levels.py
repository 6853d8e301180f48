"""The levels of a picture's pixels: which one separates ink from paper, how far the ink departs. Knows nothing about blots.

Sorting all pixels once is faster than np.median, np.percentile and np.histogram, each of which goes through them again.
np.partition, which sorts less, takes ten times as long if most pixels are alike, as on a clean sheet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.bundle import Array

BINS = 64  # of a histogram of light
FAINTEST = 0.06  # of full scale: what departs from the paper by less is no ink
FAINT = 0.6  # of the threshold between ink and paper: printed or drawn lines may be this pale
OFF = 0.2  # of the ink's strength: what departs by more is not paper
PALEST = 0.15  # of the ink's strength: what departs by less is paper
CLEAR, TAIL = 4, 1.5  # ink departs so many times as far as paper varies; in noise so many times as many pixels depart half as far
DIAGONAL = math.sqrt(3)  # of a colour cube of side 1
EXTREME = 8000  # pixels of which one may depart further than the ink


def lightness(colours: Array) -> Array:
    """(h, w, 3 or 1) -> (h, w) in [0, 1]. A single grey channel comes scaled to the diagonal of the colour cube."""
    if colours.shape[2] == 1:
        return colours[..., 0] * np.float32(1 / DIAGONAL)
    return (colours[..., 0] + colours[..., 1] + colours[..., 2]) * np.float32(1 / 3)  # not mean: slow along so short an axis


def quantile(levels: Array, part: float) -> float:
    """The level below which this part, from 0 to 1, of the levels lies; they must be in ascending order."""
    place = part * (len(levels) - 1)
    low, high = float(levels[math.floor(place)]), float(levels[math.ceil(place)])
    return low + (high - low) * (place % 1)


def median(values: Array) -> float:
    return quantile(np.sort(values, axis=None), 0.5)


def otsu(levels: Array) -> float:
    """The threshold that splits levels, in ascending order, into the two most different groups."""
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
    framed: bool = False  # what is left was inside a frame
    lined: bool = False  # or stood on a line or above it
    ruled: bool = False  # there were rules from edge to edge

    @cached_property
    def levels(self) -> Array:
        return np.sort(self.line, axis=None)

    @cached_property
    def threshold(self) -> float:
        """The level that separates ink from paper, if there are both; a few extreme pixels do not move it."""
        return otsu(np.clip(self.levels, 0, quantile(self.levels, 0.998)))

    @cached_property
    def strength(self) -> float:
        """How far the ink departs: all but a few pixels depart by less."""
        few = max(4, self.line.size // EXTREME)
        return float(self.levels[-few if few < self.line.size else -1])

    @cached_property
    def grain(self) -> float:
        """The standard deviation of the sheet's own noise, from what neighbours usually differ by despite shadows and strokes."""
        if self.line.size == 1:
            return 0.0
        steps = [np.abs(np.diff(self.line, axis=axis)).ravel() for axis in (0, 1)]
        return 1.05 * median(np.concatenate(steps))

    @cached_property
    def unevenness(self) -> float:
        """How much the paper varies, for whatever reason: a standard deviation, leaving out the ink."""
        return 1.48 * median(np.abs(self.levels[: self._up_to(self.threshold)]))

    @cached_property
    def safe_threshold(self) -> float:
        """A threshold that holds for little ink too, where `threshold` would split the noise, or paper that differs by a bit."""
        sure = min(5 * max(self.unevenness, self.grain), 0.3 * self.strength)
        return max(self.threshold, 2.5 * self.unevenness, PALEST * self.strength, sure)

    @cached_property
    def noisy(self) -> bool:
        """Whether what departs most is only the tail of the paper's noise: then many more pixels depart half as far."""
        strong = self.levels[self._up_to(self.safe_threshold) :]
        if not len(strong) or quantile(strong, 0.5) >= CLEAR * self.unevenness:
            return False
        half = len(self.levels) - self._up_to(self.safe_threshold / 2)
        return bool(half - len(strong) > TAIL * len(strong))

    def _up_to(self, level: float) -> int:
        """How many pixels depart by no more than this."""
        return int(np.searchsorted(self.levels, np.float32(level), side="right"))  # for a float64 NumPy would copy all levels

    @property
    def written(self) -> bool:
        """Whether there is ink at all, and not noise alone."""
        return self.strength >= max(FAINTEST, 5 * self.grain)
