"""Removes lines drawn around or under a digit: a form's box, a teacher's ring, an underline. Knows nothing about digits.

A frame is a blot of its own, with the outline of a rectangle, a disc or an oval, that has parts on all sides of what is written.
Words beside it, such as a form's question, are removed with it, and so are empty boxes of the same size. Anything larger there
may be meant as well, and then nothing is removed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.pictures.blots import Blots, Mask, Places, between, components, crossings, grown
from service.pictures.levels import FAINT, Departure, median
from service.pictures.rectangle import SQUARE, Rectangle

FILLING = 0.25  # of a frame's shorter side: what is shorter is dirt, such as inside a 0
# Of the length of a frame that looks like a 0, a ring or an upright rectangle: what is plain and shorter may be the dot or the
# stroke in a 0.
RINGED, UPRIGHT = 0.6, 0.5
# What is plain is crossed twice by at most this share of its rows and of its columns; or it is slim, of its length, however bent.
TWICE, SLIM = 0.1, 0.35
ALIKE = 0.9  # of the largest frame's sides: what is larger than this is a frame like it
AROUND = 0.7  # of the rows and columns of what is framed: this many meet the frame on either side
BESIDE = 0.6  # of the length of what is framed: words outside are at most this high; something higher may be meant as well
THIN = 0.12  # of a line's length: its greatest height
BEYOND = 0.18  # of the width of what is written: how far a line must reach beyond it on either side
AWAY = 0.065  # of its height: a line is farther from it than this; the foot of a 2 that came off is nearer
# Of its height: a line that reaches farther beyond it, on both sides together and on each, is no foot, however near it is.
FAR, SOME = 0.9, 0.05
SHORTEST = 0.15  # of a line's length: what is shorter is dirt above an empty line
MANY = 20  # blots: among more of them, frames are not looked for
NESTED = 3  # frames, one inside the other


def unframed(departing: Departure) -> Departure | None:
    """Only what is inside a frame, or what stands above a line; None if there is neither."""
    mask = departing.line > FAINT * departing.threshold
    if not departing.written or not _in_parts(mask):
        return None
    numbers = components(mask)
    if numbers.max() < 2:  # as in nearly all pictures
        return None
    blots = every = _Blots.of(numbers)
    if len(every.names) > MANY:
        return None
    for _ in range(NESTED):
        blots = blots.framed() or blots
    framed = blots is not every
    above = blots.without_a_line()
    blots = above or blots
    if blots is every:
        return None
    kept = np.isin(every.numbers, blots.names)
    others = (every.numbers > 0) & ~kept
    # What is kept keeps its smooth edges, but gets none of those of a frame.
    alone = np.where(kept | (grown(kept) & ~grown(others)), departing.line, 0)
    return replace(departing, line=alone, framed=framed, lined=departing.lined or above is not None)


def _in_parts(mask: Mask) -> bool:
    """Whether some row crosses three strokes, as with a frame around one, or is empty between others, as above a line."""
    met = crossings(mask)
    rows = np.flatnonzero(met)
    return len(rows) > 0 and (int(met.max()) > 2 or int(rows[-1] - rows[0]) >= len(rows))


class _Blots(Blots):
    """Blots of which one may be a frame or a line."""

    def framed(self) -> _Blots | None:
        """The blots inside the largest, if it is a frame; of several boxes alike, those in the only one that is not empty."""
        if len(self.names) < 2:
            return None
        frames = self._alike()
        filled = [number for number, inside in frames.items() if inside.any()]
        if len(filled) != 1:
            return None
        (frame,) = filled
        framed, beside = self.some(frames[frame]), ~frames[frame]
        beside[[frame, *(each for each in frames if each != frame and self._outline(each).fills())]] = False
        if self.some(beside).height.max(initial=0) > BESIDE * framed.longest:
            return None
        least = self._shortest(frame, plain=all(_is_plain(self.numbers == name) for name in framed.names))
        return framed if least is not None and framed.longest > least * max(self.width[frame], self.height[frame]) else None

    def _alike(self) -> dict[int, Mask]:
        """The largest blot and those outside it that are as large, each with the blots that it encloses."""
        largest = int((self.width * self.height).argmax())
        inside = self._enclosed(largest)
        large = (self.width > ALIKE * self.width[largest]) & (self.height > ALIKE * self.height[largest]) & ~inside
        return {each: inside if each == largest else self._enclosed(each) for each in np.flatnonzero(large).tolist()}

    def _enclosed(self, number: int) -> Mask:
        """Which blots lie inside this one."""
        frame = self.numbers == self.names[number]
        down, across = (self.top + self.bottom) / 2, (self.left + self.right) / 2
        near = (self.top[number] < down) & (down < self.bottom[number])
        near &= (self.left[number] < across) & (across < self.right[number])
        return np.array([near[each] and each != number and self._encloses(frame, each) for each in range(len(self.names))])

    def _encloses(self, frame: Mask, number: int) -> bool:
        """Whether parts of the frame lie on all sides of a blot, and not too far away."""
        top, bottom, left, right = (int(sides[number]) for sides in self[2:])
        rows, columns = frame[top : bottom + 1], frame[:, left : right + 1].T
        before_and_after = rows[:, :left][:, ::-1], rows[:, right + 1 :]
        above_and_below = columns[:, :top][:, ::-1], columns[:, bottom + 1 :]
        sides = [_clear(side) for side in (*before_and_after, *above_and_below)]
        if any((side >= 0).mean() < AROUND for side in sides):
            return False
        before, after, above, below = (median(side[side >= 0].astype(np.float32)) for side in sides)
        width, height = right - left + 1, bottom - top + 1
        return max(width, height) > FILLING * min(before + width + after, above + height + below)

    def _outline(self, number: int) -> Rectangle:
        frame = self.numbers == self.names[number]
        return Rectangle.around(between(frame) | between(frame.T).T)

    def _shortest(self, number: int, plain: bool) -> float | None:
        """How long what is written in this one must be, as a share of its length; None if it has no frame's outline."""
        shape = self._outline(number)
        if not plain:  # a 0 has nothing like that inside
            return 0 if shape.fills_as_oval() else None
        if shape.fills():
            return UPRIGHT if shape.bottom - shape.top > SQUARE * (shape.right - shape.left) else 0
        return RINGED if shape.fills_as_disc() else None

    def without_a_line(self) -> _Blots | None:
        """All but the widest blot and words beside it, if that is a straight line below the others that reaches beyond them on
        either side. Not above them: that is where a 7 has its bar."""
        if len(self.names) < 2:
            return None
        widest = int((self.right - self.left).argmax())
        rest = self.some(np.arange(len(self.names)) != widest)
        over_it = (rest.right >= self.left[widest]) & (rest.left <= self.right[widest])
        if over_it.any() and rest.height[~over_it].max(initial=0) <= BESIDE * rest.some(over_it).longest:
            rest = rest.some(over_it)  # what is beside the line are words, such as a form's question
        top, bottom, left, right = rest.top.min(), rest.bottom.max(), rest.left.min(), rest.right.max()
        height, beyond = bottom - top + 1, (left - self.left[widest], self.right[widest] - right)
        no_foot = sum(beyond) > FAR * height and min(beyond) > SOME * height
        if not no_foot and min(beyond) < BEYOND * (right - left + 1):
            return None
        line = self.numbers == self.names[widest]
        box = Rectangle.around(line)
        if box.bottom - box.top > THIN * (box.right - box.left):
            return None
        across = slice(left, right + 1)
        below = _rows_between(np.isin(self.numbers[:, across], rest.names), line[:, across])
        apart = below > (0 if no_foot else AWAY * height)
        return rest if apart and rest.longest > SHORTEST * (box.right - box.left) else None


def _clear(side: Mask) -> Places:
    """In each row, how many pixels come before the first marked one; -1 if none is marked."""
    if not side.shape[1]:
        return np.full(len(side), -1)
    return np.where(side.any(axis=1), side.argmax(axis=1), -1)


def _rows_between(written: Mask, line: Mask) -> int:
    """How many rows lie between them in the column where they are nearest; negative if the line is above."""
    last = len(written) - 1 - written[::-1].argmax(axis=0)
    both = written.any(axis=0) & line.any(axis=0)
    return int((line.argmax(axis=0) - last)[both].min(initial=len(line))) - 1


def _is_plain(blot: Mask) -> bool:
    """Whether it is a dot, or a stroke that is not bent much."""
    met = crossings(blot), crossings(blot.T)
    if all(np.count_nonzero(each > 1) <= TWICE * np.count_nonzero(each) for each in met):
        return True
    box = Rectangle.around(blot)
    short, long = sorted((box.right - box.left, box.bottom - box.top))
    return short < SLIM * long
