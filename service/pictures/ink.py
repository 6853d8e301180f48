"""Finds the ink in a picture: which pixels are written on, on any paper, in any colour and light. Knows no digits.

What the paper is, paper.py finds; ink is what departs from it along one line through colour space. Specks are dropped, and what
else the picture shows (company.py); what is left is 1 in the middle of a stroke and 0 on paper. Where the picture shows more than
the sheet, it is the sheet alone that is looked at; where ink is but a small part of it, that part, closer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from service.bundle import Array
from service.pictures.blots import components, grown
from service.pictures.company import meant
from service.pictures.levels import DIAGONAL, Departure, median
from service.pictures.paper import departure
from service.pictures.sheet import sheet_of

LARGEST, SMALLEST = 256, 80  # pixels: the longer side of the picture we work on
CLOSEST = 4 * LARGEST  # the same, where only a part of it is looked at
ENOUGH = 60  # pixels of ink's longer side with which nothing is gained by a closer look
AROUND = 0.5  # of ink's longer side: the paper beside it that is looked at with it
STEP, DOT, SPARSE = 15, 1.2, 4  # of 255, by which dots differ; pixels, by which they are smoothed; one in so many rows is asked
HOT = 8  # pixels of a sensor that may be brighter than all that it sees
SPECK = 0.04  # of the largest blot: what is smaller is dirt


def ink_of(picture: Image.Image, alone: bool = True) -> Array:
    """(h, w) in [0, 1], not the picture's own size; all zero where nothing is written."""
    colours = _colours(picture, LARGEST)
    sheet = sheet_of(colours)
    departing = departure(colours if sheet is None else sheet.colours, alone)
    if sheet is not None and sheet.lined and alone:
        whole = departure(colours)
        if whole.framed or whole.ruled:  # it is a cell of a table, or of squared paper
            sheet, departing = None, whole
    ink = _cleaned(departing, alone)
    if sheet is not None and not ink.any():
        sheet, departing = None, departure(colours, alone)
        ink = _cleaned(departing, alone)
    if ink.any() and max(picture.size) > LARGEST and (place := _place(ink)).longer < ENOUGH:
        closer = _closer(picture, place, sheet is not None, alone)
        if departing.framed or departing.lined:  # which may run out of what is looked at closer
            closer = closer * place.seen(ink, *closer.shape)
        return closer if closer.any() else ink
    return ink


def _closer(picture: Image.Image, place: _Place, on_sheet: bool, alone: bool) -> Array:
    """The ink of a part of the picture, or of its sheet; all zero where the sheet is not found again."""
    colours = _colours(picture, CLOSEST)
    if on_sheet:
        sheet = sheet_of(colours)
        if sheet is None:
            return np.zeros((1, 1), np.float32)
        colours = sheet.colours
    return _cleaned(departure(place.cut(colours), alone), alone)


class _Place(NamedTuple):
    """Where ink lies, as parts of the height and of the width, and its longer side in pixels."""

    rows: tuple[float, float]
    columns: tuple[float, float]
    longer: int

    def seen(self, ink: Array, height: int, width: int) -> Array:
        """(h, w) of the part looked at closer: 1 where, or hardly beside where, there was ink from afar."""
        near = self.cut(grown(ink > 0).astype(np.float32))
        return np.asarray(Image.fromarray(near).resize((width, height), Image.Resampling.NEAREST))

    def cut(self, colours: Array) -> Array:
        height, width = colours.shape[:2]
        top, bottom = (round(part * height) for part in self.rows)
        left, right = (round(part * width) for part in self.columns)
        return colours[top:bottom, left:right]


def _place(ink: Array) -> _Place:
    sides = [np.flatnonzero(ink.max(axis=axis)) for axis in (1, 0)]
    longer = int(max(side[-1] - side[0] + 1 for side in sides))
    rows, columns = (
        (max(0.0, (side[0] - AROUND * longer) / full), min(1.0, (side[-1] + 1 + AROUND * longer) / full))
        for side, full in zip(sides, ink.shape, strict=True)
    )
    return _Place(rows, columns, longer)


def _colours(picture: Image.Image, largest: int) -> Array:
    """(h, w, 3) in [0, 1], of a size to work with; (h, w, 1) of grey ones, as long as the diagonal of the colour cube."""
    if picture.mode.startswith("I"):
        picture = _eight_bits(picture)
    clear = picture.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info
    grey = picture.mode in ("1", "L") and not clear
    mode = "RGBA" if clear else "L" if grey else "RGB"
    if picture.mode != mode:  # a copy of a large picture is 100 MB
        picture = picture.convert(mode)
    factor = -(-max(picture.size) // largest)
    if factor > 1:
        picture = picture.reduce(factor)
    if max(picture.size) < SMALLEST:
        scale = SMALLEST / max(picture.size)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    levels = np.asarray(picture)
    if _dotted(levels if grey else levels[..., 1]):
        levels = np.asarray(picture.filter(ImageFilter.GaussianBlur(DOT)))
    if grey:
        levels = levels[..., None]
    elif all(np.array_equal(levels[..., 0], levels[..., other]) for other in (1, 2)):
        levels = levels[..., ::3]  # one of three equal channels, and the opacity
    parts: Array = levels * np.float32(1 / 255)
    colours = _on_paper(parts[..., :-1], parts[..., -1:]) if clear else parts
    return colours * np.float32(DIAGONAL) if colours.shape[2] == 1 else colours


def _dotted(levels: NDArray[np.uint8]) -> bool:
    """Whether most neighbours differ, as where dots stand for greys."""
    steps = np.diff(levels[::SPARSE].astype(np.int16), axis=1)
    return bool(np.count_nonzero(np.abs(steps) > STEP) > steps.size / 2)


def _eight_bits(picture: Image.Image) -> Image.Image:
    """A picture of up to 16 bits, as bright as it goes: many instruments fill 10 or 12 bits of them."""
    levels = np.clip(np.asarray(picture), 0, 65535)
    top, spared = int(levels.max()), min(HOT, levels.size // 100)
    if np.count_nonzero(levels > top / 2) <= spared:
        top = int(np.partition(levels, -1 - spared, axis=None)[-1 - spared])
    return Image.fromarray(np.clip(levels * np.float32(255 / max(1, top)), 0, 255).astype(np.uint8))


def _on_paper(colours: Array, alpha: Array) -> Array:
    """Transparent parts get the colour that shows best what is not: see-through drawings come in black and in white."""
    there = alpha[..., 0] > 0.5 * float(alpha.max())  # a highlighter's ink is nowhere solid
    solid = colours[there]
    if not len(solid):
        return np.ones_like(colours)
    light = solid.mean(axis=1)
    darkest, lightest = np.percentile(light, (2, 98))
    varied = lightest - darkest > 0.25
    if varied and len(solid) > 0.5 * alpha.size:
        paper = np.median(solid, axis=0)  # a picture in itself, with a few holes or round corners
    else:
        rim = (colours[_rim(there)].mean(axis=1) > (darkest + lightest) / 2).mean() if varied else 0.5
        bright = rim > 0.5 if abs(rim - 0.5) > 0.4 else light.mean() <= 0.5  # cut out with some of its paper, or ink alone
        paper = np.full(colours.shape[2], float(bright))
    return (colours * alpha + paper.astype(np.float32) * (1 - alpha)).astype(np.float32)


def _rim(there: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """What lies beside something that is not there: (H, W) of both."""
    around = np.pad(there, 1, constant_values=True)
    return there & ~(around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:])


def _cleaned(departing: Departure, alone: bool) -> Array:
    """1 in the strokes and 0 around them; specks gone, and where one digit is looked for what else there is."""
    line, blank = departing.line, np.zeros_like(departing.line)
    if not departing.written or departing.noisy:
        return blank
    paper, threshold = departing.unevenness, departing.safe_threshold
    strong = line > threshold
    if not strong.any():
        return blank
    blots = components(line > 0.8 * threshold)
    if alone:
        blots = meant(blots)
        strong &= blots > 0
        if not strong.any():
            return blank
    full = median(line[strong])
    sizes = np.bincount(blots[strong], minlength=int(blots.max()) + 1)
    sizes[0] = 0
    # The smooth edge of a stroke lies below the threshold, a pixel or two around what is above it.
    chosen = grown((sizes >= max(SPECK * sizes.max(), 1))[blots])
    low = max(0.1 * full, min(2 * paper, 0.5 * threshold))
    return np.where(chosen, np.clip((line - low) / (full - low), 0, 1), 0).astype(np.float32)
