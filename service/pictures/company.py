"""Removes what a picture shows besides what is meant: a desk, neighbours in a row, words, a phone's icons and buttons.

What is meant is the tallest blot with what lies close to it. Everything else is removed if the picture's border cuts it, or if it
is low and far away. If something far away is not that low, it may be meant too, and then all of that stays. Knows no digits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.pictures.blots import Blots, Mask, edge

MANY = 150  # blots: more of them are a texture
HIGH = 0.2  # of the picture's shorter side: if something higher is clear of the border, what touches the border is cut by it
CLOSE = 0.25  # of the length of what is meant: what is this near is part of it
BESIDE, ABOVE = 0.08, 0.15  # the same for what the border cuts: beside it, and above or below it
LOW = 0.45  # of the height of what is meant: what is lower, and not near, is something else
WHOLE = 0.95  # of a side of the picture: a desk lies along at least this much
ALONE = 0.97  # of a desk: more than this lies between that side and its edge
STRAIGHT, NEARLY = 2.5, 0.95  # pixels from a straight line, within which this much of a desk's edge lies


def meant(blots: NDArray[np.int64]) -> NDArray[np.int64]:
    """(h, w) of names, 0 outside -> the same, also with 0 for everything that is not meant."""
    rim, many = np.unique(edge(blots)), int(blots.max())
    if many == 1 and not rim.any():  # as in most pictures
        return blots
    every = Blots.of(blots)
    if len(every.names) > MANY:
        return blots
    kept = every.some(np.array([name not in rim or not _is_desk(blots == name) for name in every.names], bool))
    cut = np.isin(kept.names, rim)
    if cut.any() and kept.height[~cut].max(initial=0) > HIGH * min(blots.shape):
        stays = _near_the_tallest(kept, ~cut, BESIDE, ABOVE) | ~cut
        kept, cut = kept.some(stays), cut[stays]
    if len(kept.names) > 1:
        near = _near_the_tallest(kept, np.ones(len(kept.names), bool), CLOSE, CLOSE)
        top, bottom, _, _ = _box(kept.some(near))
        if not cut[near].any() and kept.height[~near].max(initial=0) < LOW * (bottom - top):
            kept = kept.some(near)
    gone = np.setdiff1d(every.names, kept.names)
    return np.where(np.isin(blots, gone), 0, blots) if len(gone) else blots


def _near_the_tallest(blots: Blots, of: Mask, beside: float, above: float) -> Mask:
    """The tallest of the blots in `of`, with whatever is this close to it, and so on for what is close to both."""
    near = np.arange(len(blots.names)) == int((of * blots.height * np.sqrt(blots.width)).argmax())
    while True:
        top, bottom, left, right = _box(blots.some(near))
        down = np.maximum(0, np.maximum(top - blots.bottom, blots.top - bottom))
        across = np.maximum(0, np.maximum(left - blots.right, blots.left - right))
        close = np.where(across > 0, beside, above) * max(bottom - top, right - left)
        before, near = near, np.hypot(down, across) <= close
        if np.array_equal(before, near):
            return near


def _box(blots: Blots) -> tuple[int, int, int, int]:
    """First row, row after the last, first column, column after the last."""
    return int(blots.top.min()), int(blots.bottom.max()) + 1, int(blots.left.min()), int(blots.right.max()) + 1


def _is_desk(blot: Mask) -> bool:
    """Whether it lies along one whole side of the picture and ends at a straight line."""
    for side in (blot, blot[::-1], blot.T, blot.T[::-1]):
        if side[0].mean() < WHOLE:
            continue
        depth = np.where(side.all(axis=0), len(side), side.argmin(axis=0))  # in each column, how far it reaches
        places = np.arange(len(depth))
        off = np.abs(np.polyval(np.polyfit(places, depth, 1), places) - depth) if len(depth) > 1 else np.zeros(1)
        if depth.sum() > ALONE * blot.sum() and np.quantile(off, NEARLY) <= STRAIGHT:
            return True
    return False
