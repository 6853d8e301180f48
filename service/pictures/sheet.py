"""Finds the sheet in a picture that shows more than that: a desk around it, a scanner's dark edge. Knows nothing about digits.

A sheet is one blot, light or dark, that nearly fills a rectangle or is a disc, and encloses what is written on it: as a hole
if the ink is as light or dark as the desk, or else as a part of the blot that differs from the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from service.bundle import Array
from service.pictures.blots import Mask, between, components, edge, grown
from service.pictures.levels import lightness, median, otsu
from service.pictures.rectangle import Rectangle

COARSE = 64  # pixels: the longer side of the reduced picture in which the sheet is looked for
SMALLEST = 0.15  # of the picture: what is smaller is no sheet
APART = 0.1  # of full scale: what differs by less is one thing, and splitting it splits only noise
MOST = 0.75  # of the picture: what covers less of it, but much of its border, may be only the lit part of a sheet
UNEVEN = 0.2  # of the step from a sheet to what is beside it: a shadow's edge is softer, or harder if ink lies across it
WRITTEN = (0.002, 0.2)  # of the sheet: less ink is dirt, or too little to be seen; with more it is the inside of a bold digit
BARE = 0.65  # of the sheet: a blot that covers less may be a stroke around the inside of a digit
ALL_ROUND = 0.95  # of what surrounds a sheet that looks blank: this much must differ from it
EDGE = 0.04  # of the sheet's longer side, cut off all around: for shadows, and edges that are not straight
NESTED = 2  # sheets, one on the other: a note on a page, a ball's white disc
RIM = 0.15  # of a disc's longer side, cut off all around: what is left is the square inside it


class Sheet(NamedTuple):
    colours: Array  # (h, w, 3 or 1)
    lined: bool  # its edge may be a line drawn on a larger sheet, such as a table's cell


def sheet_of(colours: Array) -> Sheet | None:
    """(h, w, 3 or 1) -> the sheet alone, upright, with as many channels; None if the whole picture is one. If sheets lie on each
    other, the uppermost."""
    sheet = None
    for _ in range(NESTED):
        found = _outermost(colours)
        if found is None:
            break
        sheet = Sheet(found.colours, found.lined or (sheet is not None and sheet.lined))
        colours = found.colours
    return sheet


def _outermost(colours: Array) -> Sheet | None:
    step = -(-max(colours.shape[:2]) // COARSE)
    light = lightness(colours[::step, ::step])
    if min(light.shape) < COARSE // 8:
        return None
    for mask in _masks(light):
        whole = _enclosing(mask, light)
        if whole is not None and _ends_sharply(whole, light):
            return Sheet(_upright(colours, whole, step), _goes_on(whole, light))
    return None


def _masks(light: Array) -> Iterator[Mask]:
    """What is lighter and what is darker than the level that splits the picture in two, then those that split each half."""
    levels = np.sort(light, axis=None)
    middle = otsu(levels)
    for part in (levels, levels[levels > middle], levels[levels <= middle]):
        if part.size > SMALLEST * light.size and part[-1] - part[0] > APART:
            threshold = otsu(part)
            lighter = part > threshold
            if part[lighter].mean() - part[~lighter].mean() > APART:
                yield light > threshold
                yield light <= threshold


def _enclosing(mask: Mask, light: Array) -> Mask | None:
    """The largest blot, its holes filled, if it is a sheet with something on it, or looks blank and lies on a desk."""
    if mask.sum() < SMALLEST * mask.size or edge(mask).all():
        return None  # too little, or what surrounds everything
    blots = components(mask)
    sizes = np.bincount(blots.ravel())
    sizes[0] = 0
    largest = int(sizes.argmax())
    blot = blots == largest
    if sizes[largest] < SMALLEST * mask.size or not _is_sheet_shaped(between(blot)):
        return None  # with its holes filled it is no more than what its rows span
    around = np.ones((blot.shape[0] + 2, blot.shape[1] + 2), bool)
    around[1:-1, 1:-1] = ~blot
    outside = components(around)
    whole: Mask = (outside != outside[0, 0])[1:-1, 1:-1]
    if blot.sum() < BARE * whole.sum() or not _is_sheet_shaped(whole):
        return None
    if whole.mean() < MOST and edge(whole).mean() > 1 - MOST and not _runs_out(whole, light):
        return None
    if edge(whole).any() and whole[[0, 0, -1, -1], [0, -1, 0, -1]].all():
        return None  # a desk beside a sheet shows in a corner; anything else at the border is ink that touches it
    written = (whole & ~mask).sum() / whole.sum()
    if written <= WRITTEN[0]:
        written = _inked(light[~grown(~whole)]) / whole.sum()
        if not WRITTEN[0] < written < WRITTEN[1]:  # too little to be seen from afar, or else a lamp splits the sheet
            return whole if _on_a_desk(whole, light) else None
    return whole if written < WRITTEN[1] else None


def _is_sheet_shaped(blot: Mask) -> bool:
    """Whether it is a rectangle, or a disc that lies entirely inside the picture."""
    box = Rectangle.around(blot)
    return box.fills() or (box.fills_as_disc() and not edge(blot).any())


def _runs_out(whole: Mask, light: Array) -> bool:
    """Whether it is a sheet that runs out of the picture, rather than the part of a sheet that is in the light."""
    beside = light[~grown(whole)]
    if not beside.size or _inked(beside) > WRITTEN[0] * light.size:
        return False
    apart = abs(median(light[whole]) - median(beside))
    return abs(_step(whole, light) - apart) < UNEVEN * apart


def _on_a_desk(whole: Mask, light: Array) -> bool:
    """Whether a sheet that looks blank from afar lies entirely inside the picture, and hardly anything around looks like it."""
    if edge(whole).any():
        return False
    unlike = np.abs(light[~whole] - np.float32(median(light[whole]))) > APART
    return bool(unlike.mean() > ALL_ROUND)


def _inked(light: Array) -> int:
    """How many pixels of a sheet differ from the rest of it."""
    if not light.size:
        return 0
    lighter = light > otsu(np.sort(light, axis=None))
    many = int(lighter.sum())
    if not 0 < many < light.size or light[lighter].mean() - light[~lighter].mean() < APART:
        return 0
    return min(many, light.size - many)


def _ends_sharply(whole: Mask, light: Array) -> bool:
    """Whether it ends as a sheet does where a desk begins, while a lamp's light fades."""
    return _step(whole, light) > APART


def _goes_on(whole: Mask, light: Array) -> bool:
    """Whether the paper goes on beyond the edge, which is then no wider than a line."""
    line = grown(whole)
    beyond = light[grown(line) & ~line]
    return bool(beyond.size) and bool((np.abs(beyond - np.float32(median(light[whole]))) < APART).mean() > 0.5)


def _step(whole: Mask, light: Array) -> float:
    """How much lighter or darker it is just inside than just outside."""
    inside, outside = light[grown(~whole) & whole], light[grown(whole) & ~whole]
    return float(abs(median(inside) - median(outside)))


def _upright(colours: Array, whole: Mask, step: int) -> Array:
    """The sheet turned to lie straight, with its edge cut off."""
    box = Rectangle.around(whole)
    margin = (RIM if box.round else EDGE) * max(box.right - box.left, box.bottom - box.top)
    width, height = (
        max(1, round((end - start - 2 * margin) * step)) for start, end in ((box.left, box.right), (box.top, box.bottom))
    )
    along, across = (box.left + margin) * step, (box.top + margin) * step
    cos, sin = math.cos(box.turn), math.sin(box.turn)
    turn = (cos, -sin, along * cos - across * sin, sin, cos, along * sin + across * cos)
    planes = (Image.fromarray(np.ascontiguousarray(plane)) for plane in colours.transpose(2, 0, 1))
    turned = [plane.transform((width, height), Image.Transform.AFFINE, turn, Image.Resampling.BILINEAR) for plane in planes]
    return np.stack([np.asarray(plane, np.float32) for plane in turned], axis=-1)
