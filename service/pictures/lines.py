"""Removes a line on which a digit stands, such as a form's line for the answer, even if it runs through the digit's feet.

Unlike a rule it may be the only one and end inside the picture; unlike a stroke of the digit it goes on, bare and straight, on
both sides of it. Ink that lies along it stays. Low words beside it, such as the form's question, are removed with it. Knows
nothing about digits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.pictures.blots import Blots, Mask, Places, components, grown
from service.pictures.frames import BESIDE, FAR
from service.pictures.levels import FAINT, Departure, median
from service.pictures.rules import EDGE, STEEPEST, STRAIGHT, WIDEST, Rule, Runs, Weight, bare, cleared

ENDING = 0.04  # of a line's length: the part at either end where it is bare
BELOW = 0.35  # of the height of what stands on a line: how much may hang below
SHORT = 0.15  # of a line's length: if the line with all that stands on it is lower, that is dirt


def unlined(departing: Departure) -> Departure:
    """The same without the line on which something stands, if there is one."""
    threshold = FAINT * departing.threshold
    mask = departing.line > threshold
    if not departing.written or mask.shape[1] < 2 * EDGE:
        return departing
    blots = Blots.of(components(mask))
    widest = int(blots.width.argmax())
    left, right = int(blots.left[widest]), int(blots.right[widest]) + 1
    found = _line(blots.numbers[:, left:right] == blots.names[widest])
    if found is None:
        return departing
    rows = np.full(mask.shape[1], -len(mask))
    rows[left:right], high = found
    near = np.abs(np.arange(len(mask))[:, None] - rows) <= STRAIGHT + WIDEST * max(mask.shape)
    rule = Rule.along(np.clip(rows, 0, len(mask) - 1), np.where(near, departing.line, 0), Runs.of(mask))
    if rule is None:
        return departing
    rule = rule.where((rule.columns >= left) & (rule.columns < right))
    line = cleared(departing.line, bare([rule], Weight.of([rule]), mask.shape[1]), threshold)
    beside = (blots.right < left) | (blots.left >= right)
    if blots.height[beside].max(initial=0) <= BESIDE * high:
        line[grown(np.isin(blots.numbers, blots.names[beside]))] = 0
    return replace(departing, line=line, lined=True)


def _line(blot: Mask) -> tuple[Places, float] | None:
    """The row of the line in each column of a blot, and how high the rest of the blot stands on it; None if there is no line."""
    height, wide = blot.shape
    first, last = blot.argmax(axis=0), height - 1 - blot[::-1].argmax(axis=0)
    if wide < 2 * EDGE or last.max() - first.min() + 1 < SHORT * wide:
        return None
    part = max(3, round(ENDING * wide))
    ends = np.r_[:part, wide - part : wide]
    heavy = median((last - first + 1)[ends].astype(np.float32))
    if heavy > max(2, WIDEST * wide):
        return None
    middle = (first + last) / 2
    slope, start = np.polyfit(ends, middle[ends], 1)
    path = start + slope * np.arange(wide)
    is_bare = (np.abs(middle - path) <= STRAIGHT) & (last - first < heavy + STRAIGHT)
    if abs(slope) > STEEPEST or not is_bare[ends].all() or is_bare.all():
        return None
    begins, ended = int(is_bare.argmin()), wide - int(is_bare[::-1].argmin())  # columns of what stands on it
    above, below = (float(beyond[begins:ended].max()) for beyond in (path - first, last - path))
    if wide - (ended - begins) < FAR * above or below > BELOW * above or above < SHORT * wide:
        return None
    return np.rint(path).astype(np.intp), above
