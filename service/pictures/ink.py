"""Finds the ink in a picture: which pixels are written on, on any paper, in any colour and light. Knows nothing about digits.

paper.py finds out what the paper looks like; ink is what departs from it along one line through colour space. Specks and what
else the picture shows (company.py) are dropped; what is left is 1 in the middle of a stroke and 0 on paper. If the picture shows
more than the sheet, only the sheet is looked at; if the ink is only a small part of it, that part is looked at again, closer.
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
CLOSEST = 4 * LARGEST  # the same if only a part of it is looked at
ENOUGH = 60  # pixels of the ink's longer side: from here on a closer look gains nothing
AROUND = 0.5  # of the ink's longer side: the margin of paper that is looked at with it
STEP, DOT, SPARSE = 15, 1.2, 4  # of 255: dots differ by more; pixels: the blur that smooths them; one row in so many is looked at
HOT = 8  # pixels of a sensor that may be brighter than anything it sees
SPECK = 0.04  # of the largest blot: what is smaller is dirt


def ink_of(picture: Image.Image, alone: bool = True) -> Array:
    """(h, w) in [0, 1], not of the picture's own size; all zero if nothing is written."""
    colours = _colours(picture, LARGEST)
    sheet = sheet_of(colours)
    departing = departure(colours if sheet is None else sheet.colours, alone)
    if sheet is not None and sheet.lined and alone:
        whole = departure(colours)
        if whole.framed or whole.ruled:  # the sheet is only a cell of a table, or of squared paper
            sheet, departing = None, whole
    ink = _cleaned(departing, alone)
    if sheet is not None and not ink.any():
        sheet, departing = None, departure(colours, alone)
        ink = _cleaned(departing, alone)
    if ink.any() and max(picture.size) > LARGEST and (place := _place(ink)).longer < ENOUGH:
        closer = _closer(picture, place, sheet is not None, alone)
        if departing.framed or departing.lined:  # a frame or a line may run out of the part that is looked at closer
            closer = closer * place.seen(ink, *closer.shape)
        return closer if closer.any() else ink
    return ink


def _closer(picture: Image.Image, place: _Place, on_sheet: bool, alone: bool) -> Array:
    """The ink of a part of the picture, or of its sheet; all zero if the sheet is not found again."""
    colours = _colours(picture, CLOSEST)
    if on_sheet:
        sheet = sheet_of(colours)
        if sheet is None:
            return np.zeros((1, 1), np.float32)
        colours = sheet.colours
    return _cleaned(departure(place.cut(colours), alone), alone)


class _Place(NamedTuple):
    """Where the ink lies, with a margin, as fractions of the height and the width; and its longer side in pixels."""

    rows: tuple[float, float]
    columns: tuple[float, float]
    longer: int

    def seen(self, ink: Array, height: int, width: int) -> Array:
        """(h, w) of the closer look: 1 where the first look found ink, and right beside that."""
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
    """(h, w, 3) in [0, 1], of a size to work with; for grey pictures (h, w, 1), scaled to the diagonal of the colour cube."""
    if picture.mode.startswith("I"):
        picture = _eight_bits(picture)
    clear = picture.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info
    grey = picture.mode in ("1", "L") and not clear
    mode = "RGBA" if clear else "L" if grey else "RGB"
    if picture.mode != mode:  # convert always copies, and a copy of a large picture is 100 MB
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
        levels = levels[..., ::3]  # one of three equal channels, and the opacity if there is one
    parts: Array = levels * np.float32(1 / 255)
    colours = _on_paper(parts[..., :-1], parts[..., -1:]) if clear else parts
    return colours * np.float32(DIAGONAL) if colours.shape[2] == 1 else colours


def _dotted(levels: NDArray[np.uint8]) -> bool:
    """Whether most neighbours differ, as in pictures that show greys by dots."""
    steps = np.diff(levels[::SPARSE].astype(np.int16), axis=1)
    return bool(np.count_nonzero(np.abs(steps) > STEP) > steps.size / 2)


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Scales a picture of up to 16 bits to its brightest pixels: many instruments fill only 10 or 12 of the bits."""
    levels = np.clip(np.asarray(picture), 0, 65535)
    top, spared = int(levels.max()), min(HOT, levels.size // 100)
    if np.count_nonzero(levels > top / 2) <= spared:
        top = int(np.partition(levels, -1 - spared, axis=None)[-1 - spared])
    return Image.fromarray(np.clip(levels * np.float32(255 / max(1, top)), 0, 255).astype(np.uint8))


def _on_paper(colours: Array, alpha: Array) -> Array:
    """Gives transparent parts the colour that shows the others best: drawings on transparency come in black and in white."""
    there = alpha[..., 0] > 0.5 * float(alpha.max())  # a highlighter's ink is nowhere opaque
    solid = colours[there]
    if not len(solid):
        return np.ones_like(colours)
    light = solid.mean(axis=1)
    darkest, lightest = np.percentile(light, (2, 98))
    varied = lightest - darkest > 0.25
    if varied and len(solid) > 0.5 * alpha.size:
        paper = np.median(solid, axis=0)  # a whole picture, with a few holes or round corners
    else:
        rim = (colours[_rim(there)].mean(axis=1) > (darkest + lightest) / 2).mean() if varied else 0.5
        bright = rim > 0.5 if abs(rim - 0.5) > 0.4 else light.mean() <= 0.5  # cut out with some of its paper, or else ink alone
        paper = np.full(colours.shape[2], float(bright))
    return (colours * alpha + paper.astype(np.float32) * (1 - alpha)).astype(np.float32)


def _rim(there: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """What is there and lies beside something that is not: (H, W) -> (H, W)."""
    around = np.pad(there, 1, constant_values=True)
    return there & ~(around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:])


def _cleaned(departing: Departure, alone: bool) -> Array:
    """1 in the strokes and 0 around them, without specks and, if one digit is looked for, without what else there is."""
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
