"""Lines printed on the paper, ruled or squared: straight, thin, from edge to edge, and never alone. Knows no digits.

A stroke of a digit that is cut out closely also goes from edge to edge, but no digit has two thin ones side by side. Where ink
crosses a rule it stays: a rule is taken away where it is as wide as elsewhere, and as pale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.bundle import Array
from service.pictures.blots import Mask
from service.pictures.levels import Departure, median

FAINT = 0.6  # of the threshold that parts ink from paper: rules may be this pale, and what is paler does no harm
EDGE = 10  # columns at either side of which one must cross rules; the first may lie along one itself
STEEPEST = 0.18  # of the way across: how far a rule may rise or fall, ten degrees
COVERED = 0.85  # of a rule: what is seen of it, or lies under ink
SEEN = 0.3  # of the way across: a rule of which less is inside, in a corner, is left alone
FANNED = 4  # pixels of rise by which rules of one sheet may differ, in perspective
BLOCK = 8  # columns that are counted together
WIDEST = 1 / 30  # of the picture's longer side
STRAIGHT = 2  # pixels that a rule may lie beside its line
DARKER = 1.5  # times as dark as its rule is ink that lies along it

Places = NDArray[np.intp]


def unruled(departing: Departure) -> Departure:
    """The same without rules, if there are any."""
    if not departing.written:
        return departing
    threshold = FAINT * departing.threshold
    line, ruled = departing.line, False
    for turn in range(3):  # those that go across; the picture is turned; a margin may be one alone, and have come first
        if turn < 2 or ruled:
            cleared = _without(line, threshold, least=1 if ruled else 2)
            ruled |= cleared is not line
            line = cleared.T
    return Departure(line.T) if ruled else departing


def _without(line: Array, threshold: float, least: int) -> Array:
    """Without rules that go across, if there are as many; the same object else."""
    mask = line > threshold
    if mask.shape[1] < 2 * EDGE or min(_crossings(mask[:, :EDGE]), _crossings(mask[:, -EDGE:])) < least:
        return line  # as nearly all pictures
    runs = _Runs.of(mask)
    rules = [rule for path in _straight(mask) if (rule := _rule(path, line, runs)) is not None]
    if len(rules) < least:
        return line
    steps = np.zeros((line.shape[0] + 1, line.shape[1]), np.int32)
    for rule in rules:
        np.add.at(steps, (np.maximum(rule.top - 1, 0), rule.columns), 1)  # with its smooth edge
        np.add.at(steps, (np.minimum(rule.bottom + 2, line.shape[0]), rule.columns), -1)
    cleared: Array = np.where(np.cumsum(steps[:-1], axis=0) > 0, np.float32(0), line)
    alone = len(rules) == 1 and not (cleared > threshold).any()
    return line if alone else cleared  # a 1 that is cut out closely


def _crossings(side: Mask) -> int:
    """How many times the columns are crossed, the one that is crossed most."""
    begun = np.diff(side.astype(np.int8), axis=0, prepend=0) == 1
    return int(begun.sum(axis=0).max())


class _Runs(NamedTuple):
    """Of each marked pixel the first and the last row of what hangs together with it in its column."""

    mask: Mask
    first: Places
    last: Places

    @staticmethod
    def of(mask: Mask) -> _Runs:
        height = len(mask)
        rows = np.arange(height)[:, None]
        first = np.maximum.accumulate(np.where(mask, -1, rows), axis=0) + 1
        last = np.minimum.accumulate(np.where(mask, height, rows)[::-1], axis=0)[::-1] - 1
        return _Runs(mask, first, last)


class _Rule(NamedTuple):
    """Where a rule lies and no ink: columns, and in each the first and the last row."""

    columns: Places
    top: Places
    bottom: Places


def _straight(mask: Mask) -> Iterator[Places]:
    """Straight lines that are marked from edge to edge, about: the row in each column, which may lie outside."""
    height, width = mask.shape
    wide = mask.copy()  # a row to either side, for what is not quite straight
    wide[1:] |= mask[:-1]
    wide[:-1] |= mask[1:]
    starts = np.arange(0, width, BLOCK)
    sizes = np.diff([*starts, width])
    blocks = np.add.reduceat(wide, starts, axis=1, dtype=np.int32)  # (h, blocks)
    rises = np.arange(-round(STEEPEST * width), round(STEEPEST * width) + 1)
    middles = (starts + (sizes - 1) / 2) / (width - 1) - 0.5  # of each block, from -0.5 to 0.5
    rows = np.arange(height)[:, None] + np.rint(rises[:, None] * middles).astype(np.intp)[:, None]  # (rises, h, blocks)
    inside = (rows >= 0) & (rows < height)
    found = np.where(inside, blocks[np.clip(rows, 0, height - 1), np.arange(len(sizes))], 0).sum(axis=2)  # (rises, h)
    length = (inside * sizes).sum(axis=2)
    share = np.where(length >= SEEN * width, found / np.maximum(length, 1), 0.0)
    usual = int((share * (length == width) >= COVERED).sum(axis=1).argmax())
    fan = slice(max(0, usual - FANNED), usual + FANNED + 1)
    strength, along = share[fan].max(axis=0), np.linspace(-0.5, 0.5, width)
    begins = np.flatnonzero(np.diff((strength >= COVERED).astype(np.int8), prepend=0, append=0))
    for start, end in zip(begins[::2], begins[1::2], strict=True):
        best = start + int(strength[start:end].argmax())
        rise = rises[fan][np.flatnonzero(share[fan, best] == strength[best])].mean()
        yield np.rint(best + rise * along).astype(np.intp)


def _rule(path: Places, line: Array, runs: _Runs) -> _Rule | None:
    """What lies along the path and is as wide and as pale as most of it; None where that is wider than rules are."""
    height = len(line)
    at = np.full(len(path), -1)
    for step in sorted(range(-STRAIGHT, STRAIGHT + 1), key=abs, reverse=True):  # the nearest counts
        beside = np.clip(path + step, 0, height - 1)
        at = np.where(runs.mask[beside, np.arange(len(path))] & (beside == path + step), beside, at)
    columns = np.flatnonzero(at >= 0)
    rows = at[columns]
    top, bottom = runs.first[rows, columns], runs.last[rows, columns]
    wide, dark = bottom - top + 1, line[rows, columns]
    usual = median(wide.astype(np.float32))
    if usual > max(2, WIDEST * max(line.shape)):
        return None
    plain = (wide <= usual + 1) & (dark < DARKER * median(dark))
    return _Rule(columns[plain], top[plain], bottom[plain])
