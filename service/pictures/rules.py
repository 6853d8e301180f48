"""Removes rules printed on ruled or squared paper: straight, thin, from edge to edge, never alone. Knows nothing about digits.

A stroke of a closely cropped digit also goes from edge to edge: two or three such lines are taken for strokes if everything else
touches them. Ink that crosses a rule stays: a rule is removed only where it is as wide and as pale as rules are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from service.bundle import Array
from service.pictures.blots import Mask, Places, components, crossings
from service.pictures.levels import FAINT, OFF, Departure, median, quantile

EDGE = 10  # columns at either side: one of them must cross the rules; the first may itself lie along one
STEEPEST = 0.18  # of the width: how far a rule may rise or fall; a slope of ten degrees
COVERED = 0.85  # of a rule: at least this much is visible, or lies under ink
SEEN = 0.3  # of the width: a rule of which less is inside the picture, across a corner, is left alone
FANNED = 4  # pixels by which the rise of one sheet's rules may differ, in perspective
BLOCK = 8  # columns that are counted together
WIDEST = 1 / 30  # of the picture's longer side: rules are no wider
STRAIGHT = 2  # pixels by which a rule may deviate from a straight line
NEAREST = np.array(sorted(range(-STRAIGHT, STRAIGHT + 1), key=lambda step: (abs(step), -step)))  # these, in the order tried
DARKER = 2.2  # times: ink along a rule is this much darker than rules; where two fine ones cross they are nearly twice as dark
OWN = 0.2  # of a rule: if no more than this part is as narrow and pale as the other rules, it is a heavier one
ENDS = 4  # columns at either side that a heavier rule must reach
HEAVIER = 2  # pixels by which a stroke is wider than the rules of its paper
STROKES = 3  # strokes from edge to edge that a digit may have
MIDDLE = 0.2  # of the picture: a stroke lies within this distance of its middle, a margin does not
BESIDE = 4  # pixels within which a blot touches a stroke


def unruled(departing: Departure) -> Departure:
    """The same without rules, if there are any."""
    if not departing.written:
        return departing
    threshold = min(FAINT * departing.threshold, OFF * departing.strength)
    line, others = departing.line, None
    for _ in range(2):  # those that go across, then those that go down
        line, others = _without(line, threshold, others)
        line = line.T
    if others is None:
        return departing
    line, _ = _without(line, threshold, others)  # across once more: a single one, such as a margin, is a rule if there are others
    return replace(departing, line=line, ruled=True)


class Weight(NamedTuple):
    """What rules usually are: how many pixels wide, how dark."""

    wide: float
    dark: float

    @staticmethod
    def of(rules: Sequence[Rule]) -> Weight:
        return Weight(median_low([median(rule.wide) for rule in rules]), median_low([median(rule.dark) for rule in rules]))


def _without(line: Array, threshold: float, others: Weight | None) -> tuple[Array, Weight | None]:
    """The picture without rules that go across, and their weight; it takes two, or one if others were taken before."""
    mask, least = line > threshold, 1 if others else 2
    if mask.shape[1] < 2 * EDGE or min(int(crossings(side.T).max()) for side in (mask[:, :EDGE], mask[:, -EDGE:])) < least:
        return line, others  # as in nearly all pictures
    runs = Runs.of(mask)
    found = [rule for path in _straight(mask) if (rule := Rule.along(path, line, runs)) is not None]
    if len(found) < least:
        return line, others
    weight = Weight.of(found)
    rules = bare(found, weight, mask.shape[1])
    without = cleared(line, rules, threshold)
    rest = without > threshold
    if others:  # one like the others is a margin; a heavier one may be a stroke of a closely cropped digit
        heavier = weight.wide >= others.wide + HEAVIER or weight.dark >= DARKER * others.dark
        stroke = len(rules) == 1 and heavier and (_hangs_on(rules, rest) if rest.any() else rules[0].in_the_middle(len(rest)))
        return (line if stroke else without), others
    strokes = len(rules) <= STROKES and _are_strokes(rules, rest)
    return (line, None) if strokes else (without, weight)


class Runs(NamedTuple):
    """For each marked pixel, the first and the last row of its run in that column."""

    mask: Mask
    first: Places
    last: Places

    @staticmethod
    def of(mask: Mask) -> Runs:
        height = len(mask)
        rows = np.arange(height)[:, None]
        first = np.maximum.accumulate(np.where(mask, -1, rows), axis=0) + 1
        last = np.minimum.accumulate(np.where(mask, height, rows)[::-1], axis=0)[::-1] - 1
        return Runs(mask, first, last)


class Rule(NamedTuple):
    """What lies along a straight line: its columns, in each its first and last row, and how dark it is on the line."""

    columns: Places
    top: Places
    bottom: Places
    dark: Array

    @staticmethod
    def along(path: Places, line: Array, runs: Runs) -> Rule | None:
        """None if nothing lies along the path, or something wider than rules are."""
        beside = path + NEAREST[:, None]  # (steps, w)
        inside = np.clip(beside, 0, len(line) - 1)
        marked = runs.mask[inside, np.arange(len(path))] & (inside == beside)
        columns = np.flatnonzero(marked.any(axis=0))
        rows = beside[marked.argmax(axis=0)[columns], columns]
        found = Rule(columns, runs.first[rows, columns], runs.last[rows, columns], line[rows, columns])
        return found if len(columns) and median(found.wide) <= max(2, WIDEST * max(line.shape)) else None

    @property
    def wide(self) -> Array:
        return (self.bottom - self.top + 1).astype(np.float32)

    def in_the_middle(self, height: int) -> bool:
        """Whether it lies in the middle of the picture, as a closely cropped 1 does and a margin does not."""
        return abs(median((self.top + self.bottom).astype(np.float32)) / 2 / max(height - 1, 1) - 0.5) < MIDDLE

    def where(self, chosen: Mask) -> Rule:
        return Rule(self.columns[chosen], self.top[chosen], self.bottom[chosen], self.dark[chosen])


def _straight(mask: Mask) -> Iterator[Places]:
    """Straight lines that are marked nearly from edge to edge: the row in each column, which may lie outside the picture."""
    height, width = mask.shape
    thicker = mask.copy()  # by a row to either side, for what is not quite straight
    thicker[1:] |= mask[:-1]
    thicker[:-1] |= mask[1:]
    starts = np.arange(0, width, BLOCK)
    sizes = np.diff([*starts, width])
    middles = (starts + (sizes - 1) / 2) / (width - 1) - 0.5  # of each block, from -0.5 to 0.5
    most = round(STEEPEST * width)
    blank = [(0, 0), (most, most)]  # beyond the picture, where a line may go
    counts = np.pad(np.add.reduceat(thicker, starts, axis=1, dtype=np.int32).T, blank)  # (blocks, h + 2 most)
    lengths = np.pad(np.repeat(sizes.astype(np.int32)[:, None], height, axis=1), blank)

    def along(rises: Places, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """For each rise and each row, the sum along the line through that row: (rises, h)."""
        firsts = most + np.rint(rises[:, None] * middles).astype(np.intp)  # (rises, blocks)
        shifted = sliding_window_view(blocks, height, axis=1)  # (blocks, 2 most + 1, h)
        total: NDArray[np.int32] = shifted[np.arange(len(blocks)), firsts].sum(axis=1, dtype=np.int32)
        return total

    tried = np.arange(-most, most + 1, 2)  # a line is thick enough that every other rise meets it
    whole = np.count_nonzero(along(tried, counts) >= COVERED * width, axis=1)
    if not whole.any():
        return
    usual = tried[whole.argmax()]
    fan = np.arange(max(-most, usual - FANNED), min(most, usual + FANNED) + 1)
    found, length = along(fan, counts), along(fan, lengths)
    share = np.where(length >= SEEN * width, found / np.maximum(length, 1), 0.0)  # (fan, h)
    strength, across = share.max(axis=0), np.linspace(-0.5, 0.5, width)
    changes = np.flatnonzero(np.diff((strength >= COVERED).astype(np.int8), prepend=0, append=0))
    for start, end in zip(changes[::2], changes[1::2], strict=True):
        best = start + int(strength[start:end].argmax())
        rise = fan[share[:, best] == strength[best]].mean()
        yield np.rint(best + rise * across).astype(np.intp)


def bare(rules: Sequence[Rule], weight: Weight, width: int) -> list[Rule]:
    """The rules, each only where nothing else lies along it."""
    parts = []
    for rule in rules:
        whole = rule.columns[0] < ENDS and rule.columns[-1] >= width - ENDS
        wider, darker = _usual(rule.wide, weight.wide, whole), _usual(rule.dark, weight.dark, whole)
        parts.append(rule.where((rule.wide <= wider + 1) & (rule.dark < DARKER * darker)))
    return parts


def _usual(values: Array, of_all: float, whole: bool) -> float:
    """What one rule mostly is, but no more than the others, since a digit's bar may lie along most of it. Only a heavier rule may
    be more, if it goes from edge to edge, which bars do not."""
    levels = np.sort(values)
    return min(quantile(levels, 0.5), max(of_all, quantile(levels, OWN) if whole else 0.0))


def cleared(line: Array, rules: Sequence[Rule], threshold: float) -> Array:
    """The picture with rules and their smooth edges replaced by the paper beside them."""
    height, left = len(line), line.copy()
    for rule in rules:
        above = np.where(rule.top >= 2, line[np.maximum(rule.top - 2, 0), rule.columns], np.inf)
        below = np.where(rule.bottom < height - 2, line[np.minimum(rule.bottom + 2, height - 1), rule.columns], np.inf)
        paper = np.minimum(above, below)
        paper = np.where(paper <= threshold, paper, 0)
        for step in range(int(rule.wide.max(initial=0)) + 2):
            rows = rule.top - 1 + step
            here = (rows >= 0) & (rows < height) & (rows <= rule.bottom + 1)
            place = rows[here], rule.columns[here]
            left[place] = np.minimum(left[place], paper[here])
    return left


def _are_strokes(rules: Sequence[Rule], rest: Mask) -> bool:
    """Whether they are a digit's strokes: nothing lies beyond them, and what is between them reaches as far and touches them."""
    drawn = [rule for rule in rules if len(rule.columns)]
    rows, columns = np.flatnonzero(rest.any(axis=1)), np.flatnonzero(rest.any(axis=0))
    if not drawn or not len(rows):
        return False
    if rows[0] < min(rule.top.min() for rule in drawn) - 1 or rows[-1] > max(rule.bottom.max() for rule in drawn) + 1:
        return False
    if columns[0] >= EDGE or columns[-1] < rest.shape[1] - EDGE:
        return False
    return _hangs_on(drawn, rest)


def _hangs_on(rules: Sequence[Rule], rest: Mask) -> bool:
    """Whether each blot that is left touches one of the rules."""
    near = np.zeros_like(rest)
    for rule in (each for each in rules if len(each.columns)):
        middle = np.interp(np.arange(rest.shape[1]), rule.columns, (rule.top + rule.bottom) / 2)
        near |= np.abs(np.arange(len(rest))[:, None] - middle) < rule.wide.max() / 2 + BESIDE
    blots = components(rest)
    return bool(np.isin(blots[rest], blots[rest & near]).all())
