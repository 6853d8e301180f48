"""What a picture shows beside what is meant: a desk, neighbours in a row, words, a phone's own signs. Knows no digits.

What is meant is the tallest, with what lies close to it. All else goes if the picture's border cuts it, or if it is low and far
off; of what is as tall nobody can say whether it is meant as well, and then nothing is taken away.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.pictures.blots import Blots, Mask, edge

MANY = 150  # blots, which are a texture
HIGH = 0.2  # of the picture's shorter side: with something as high off its border, what lies on it is cut
CLOSE = 0.25  # of the length of what is meant: what is as near is a part of it
BESIDE, ABOVE = 0.08, 0.15  # the same, of what the border cuts: beside it, and above or below it
LOW = 0.45  # of its height: what is lower, and not near, is something else
WHOLE = 0.95  # of a side of the picture that a desk lies along
ALONE = 0.97  # of what lies there that a desk is
STRAIGHT, NEARLY = 2.5, 0.95  # pixels, within which so much of a desk's edge is one line


def meant(blots: NDArray[np.int64]) -> NDArray[np.int64]:
    """(h, w) of names, 0 outside -> the same, 0 where something else is too."""
    rim, many = np.unique(edge(blots)), int(blots.max())
    if many == 1 and not rim.any():  # as of most pictures
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
    """The tallest of some of them, with what is as close to it, and what is as close to both."""
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
    """First row, row behind the last, first column and that behind the last."""
    return int(blots.top.min()), int(blots.bottom.max()) + 1, int(blots.left.min()), int(blots.right.max()) + 1


def _is_desk(blot: Mask) -> bool:
    """Whether it lies along one whole side, and ends there at one straight line."""
    for side in (blot, blot[::-1], blot.T, blot.T[::-1]):
        if side[0].mean() < WHOLE:
            continue
        depth = np.where(side.all(axis=0), len(side), side.argmin(axis=0))  # of each column, until it ends
        places = np.arange(len(depth))
        off = np.abs(np.polyval(np.polyfit(places, depth, 1), places) - depth) if len(depth) > 1 else np.zeros(1)
        if depth.sum() > ALONE * blot.sum() and np.quantile(off, NEARLY) <= STRAIGHT:
            return True
    return False
