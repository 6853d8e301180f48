"""The smallest rectangle around a blot, turned as the blot lies, and whether it is that of a sheet, a disc, or neither."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.pictures.blots import Mask

FULL = 0.88  # of its rectangle: a rectangular blot fills more; an oval fills 0.79, and so does the outline of a 0
ROUND, SQUARE = 0.74, 1.18  # how much of its rectangle an oval fills at least; how much longer one side of a disc's is at most
TURNS = np.radians(np.arange(-45, 45, 1.5))
LEVEL = int(np.abs(TURNS).argmin())
# (2, 2 * turns): point @ SIDES is, for each turn, how far (x, y) lies along a side turned like this, and then how far across it
SIDES = np.concatenate([[np.cos(TURNS), np.sin(TURNS)], [-np.sin(TURNS), np.cos(TURNS)]], axis=1)


class Rectangle(NamedTuple):
    """Its turn in radians, its sides along and across that, and how much of it the blot fills."""

    turn: float
    left: float
    right: float
    top: float
    bottom: float
    full: float

    @staticmethod
    def around(blot: Mask) -> Rectangle:
        rows = np.flatnonzero(blot.any(axis=1))
        first, last = blot[rows].argmax(axis=1), blot.shape[1] - blot[rows, ::-1].argmax(axis=1)
        edges = [[first, last, first, last], [rows, rows, rows + 1, rows + 1]]
        corners = np.array(edges, np.float64).reshape(2, -1).T  # of each row's outermost pixels
        seen = corners @ SIDES
        low, high = (extreme.reshape(2, -1) for extreme in (seen.min(axis=0), seen.max(axis=0)))  # each (2, turns)
        areas = (high - low).prod(axis=0)

        def turned(by: int) -> Rectangle:
            (left, top), (right, bottom) = low[:, by].tolist(), high[:, by].tolist()
            return Rectangle(float(TURNS[by]), left, right, top, bottom, float(blot.sum() / areas[by]))

        smallest = turned(int(areas.argmin()))
        return turned(LEVEL) if smallest.round else smallest  # a disc has no direction

    @property
    def square(self) -> bool:
        sides = self.right - self.left, self.bottom - self.top
        return max(sides) < SQUARE * min(sides)

    @property
    def round(self) -> bool:
        return self.square and self.full <= FULL

    def fills(self) -> bool:
        """Whether the blot is this rectangle."""
        return self.full > FULL

    def fills_as_oval(self) -> bool:
        return self.full > ROUND

    def fills_as_disc(self) -> bool:
        return self.square and self.fills_as_oval()
