"""Makes any picture of a digit look like the training set, or scales a picture of anything. Knows nothing about models.

MNIST was made like this: the digit, light on black, was fitted into a 20x20 box with its proportions kept and its edges smooth,
then placed with its centre of mass in the middle of 28x28 pixels. Pictures go the same way: colours -> ink -> digit -> box.
One that was already made like this is recognised and left alone.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from service.bundle import BOX, FRAME, Array
from service.pictures.blocks import unblocked
from service.pictures.blots import extremes, stroke_width
from service.pictures.ink import ink_of

CENTRED = 0.51  # pixels: how far rounding may have moved the centre of mass from the middle
BRIGHT = 0.5  # every digit of the training set is brighter somewhere
FINE = 5  # times the final size at which the digit's strokes are measured and corrected

SQUARE = math.sqrt(2) - 1  # of an octagon's reach: the square's part; the rest is the diamond's
ROUGH = 3  # fine pixels of reach: up to this nobody sees that a square has corners

BROAD = 4.5  # final pixels: what is broader may not be a stroke
# A lamp's reflection spreads at most SHINING times as far as an oval, a dot ROUND times; blurred 8s spread further, and so does
# what has a hole. FADING: the part of a reflection that fades. LONGEST: a dot's length in widths. FULL: how dark nearly all of
# its middle is.
SHINING, FADING = 1.012, 0.38
ROUND, LONGEST, FULL = 1.007, 1.45, 0.97

# Widths of strokes in final pixels, for digits as large as MNIST's. Nearly all of MNIST's lie between these; others are changed
# to the nearer of the two. Where two digits cross, strokes seem thicker than they are.
THINNEST, THICKEST = 2.0, {1: 2.8, 2: 4.2}


def pixels(picture: Image.Image, channels: int = 1) -> Array:
    """(C, H, W) in [0, 1] with only the number format changed; transparent parts are black."""
    if picture.mode.startswith("I"):  # 16 bits of grey: Pillow's own conversion clips at 255 instead of scaling
        levels = np.array(picture, dtype=np.float32)
        levels[levels == picture.info.get("transparency", -1)] = 0
        levels /= 65535
        return np.repeat(np.clip(levels, 0.0, 1.0, out=levels)[None], channels, axis=0)
    if picture.mode not in ("1", "L", "RGB") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "black"), picture)
    mode = "L" if channels == 1 else "RGB"
    levels = np.array(picture if picture.mode == mode else picture.convert(mode), dtype=np.float32)
    levels *= np.float32(1 / 255)
    planes: Array = levels[None] if channels == 1 else np.ascontiguousarray(levels.transpose(2, 0, 1))
    return planes


def scaled(picture: Image.Image, channels: int, height: int, width: int) -> Array:
    """(C, H, W) in [0, 1]: the whole picture, its proportions kept, black beside it; for data sets that are not of ink."""
    if picture.mode == "1":
        picture = picture.convert("L")
    if picture.mode in ("L", "LA", "RGB", "RGBA"):  # before a photo's many pixels become floats
        picture = picture.reduce(max(1, int(max(picture.height / height, picture.width / width) / 4)))
    scale = min(height / picture.height, width / picture.width)
    planes = np.stack([_resized(plane, scale) for plane in pixels(picture, channels)])
    frame = np.zeros((channels, height, width), np.float32)
    top, left = (height - planes.shape[1]) // 2, (width - planes.shape[2]) // 2
    frame[:, top : top + planes.shape[1], left : left + planes.shape[2]] = planes
    return frame


def normalise(picture: Image.Image, height: int, width: int, objects: int) -> Array:
    """(H, W) in [0, 1]; black if there is nothing to see. `objects` is how many digits a picture may show."""
    untouched = _untouched(picture, height, width, objects)
    if untouched is None and (single := unblocked(picture)) is not picture:
        picture, untouched = single, _untouched(single, height, width, objects)
    if untouched is not None:
        return untouched
    return _framed(_mended(ink_of(picture, alone=objects == 1), objects, min(height, width) / FRAME[objects]), height, width)


def _untouched(picture: Image.Image, height: int, width: int, objects: int) -> Array | None:
    """The picture or its negative, if it was made like the training set."""
    if picture.size != (width, height):
        return None
    grey: Array = pixels(picture)[0]
    if _as_trained(grey, objects):
        return grey
    negative: Array = 1 - grey
    return negative if _as_trained(negative, objects) else None


def _as_trained(image: Array, objects: int) -> bool:
    """Whether something bright lies on black: a digit that fills the box, its mass in the middle, or two digits anywhere."""
    height, width = image.shape
    if image[0, 0] > 0 or image.max() < BRIGHT:  # one of the two polarities ends here
        return False
    if objects > 1:
        return True
    # dot and nonzero take half as long as sum and flatnonzero, and every picture of the hottest path comes through here.
    down, across = image.dot(np.ones(width, np.float32)), image.T.dot(np.ones(height, np.float32))
    (rows,), (columns,) = down.nonzero(), across.nonzero()
    scale = min(height, width) / FRAME[1]
    if abs(1 + int(max(rows[-1] - rows[0], columns[-1] - columns[0])) - BOX[1] * scale) > max(1, scale):
        return False
    return abs(_middle(down) - height / 2) < CENTRED and bool(abs(_middle(across) - width / 2) < CENTRED)


def _middle(mass: Array) -> float:
    """The centre of mass as a pixel's index: a frame of 28 has its middle at 14, as the training set's authors counted."""
    return float(mass.dot(np.arange(len(mass), dtype=np.float32))) / float(mass.sum())


def _mended(ink: Array, objects: int, scale: float) -> Array:
    """The digit alone, fitted into the box, with strokes of a width that the network has seen, both times `scale`."""
    box = BOX[objects]
    digit = _cropped(ink)
    if not digit.size:
        return digit
    fine = _resized(np.pad(digit, 1), FINE * box / max(digit.shape))
    stroke = stroke_width(fine) / FINE
    if stroke > BROAD and _is_spot(fine):
        return digit[:0, :0]
    target = min(max(stroke, THINNEST), THICKEST[objects])
    reach = round(abs(target - stroke) * FINE / 2)
    if reach:
        fine = _extremes(fine, reach, np.maximum if target > stroke else np.minimum)
    fine = _cropped(fine)
    return _resized(fine, box * scale / max(fine.shape)) if fine.size else fine


def _is_spot(ink: Array) -> bool:
    """Whether it is an oval that fades on all sides, like a lamp's reflection, or one that is full and nearly round: a dot."""
    places = np.nonzero(ink > 0.5)
    narrow, wide = np.sqrt(np.linalg.eigvalsh(np.cov(places)).clip(0))  # standard deviations along its axes
    spread = 4 * math.pi * narrow * wide / len(places[0])
    if spread < SHINING and np.count_nonzero((ink > 0.15) & (ink < 0.85)) >= FADING * ink.sum():
        return True
    if spread > ROUND or wide > LONGEST * narrow:
        return False
    height, width = ink.shape
    middle = ink[height // 4 : height - height // 4, width // 4 : width - width // 4]
    return bool(np.quantile(middle, 0.02) > FULL)


def _extremes(image: Array, reach: int, choose: np.ufunc) -> Array:
    """The largest or smallest value within `reach` of each pixel, with black all around; Pillow's filters take far longer.

    "Within" means in an octagon, made of a diamond and a square: a square alone would cut square holes into a thick 8.
    """
    square = min(reach, max(ROUGH, round(reach * SQUARE)))
    image = np.pad(image, 2 * reach)
    for _ in range(reach - square):
        middle = choose(choose(image[:-2, 1:-1], image[2:, 1:-1]), choose(image[1:-1, :-2], image[1:-1, 2:]))
        image = choose(middle, image[1:-1, 1:-1])
    window = 2 * square + 1
    for _ in range(2):  # down, then across
        image = extremes(image, window, choose).T
    return image


def _cropped(ink: Array) -> Array:
    rows, columns = np.flatnonzero(ink.max(axis=1) > 0.5), np.flatnonzero(ink.max(axis=0) > 0.5)
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] if len(rows) else ink[:0, :0]


def _framed(digit: Array, height: int, width: int) -> Array:
    """The digit with its centre of mass in the middle of the frame, or as near to it as it fits."""
    frame = np.zeros((height, width), np.float32)
    if not digit.size or not digit.any():
        return frame
    top = min(max(round(height / 2 - _middle(digit.sum(axis=1))), 0), height - digit.shape[0])
    left = min(max(round(width / 2 - _middle(digit.sum(axis=0))), 0), width - digit.shape[1])
    frame[top : top + digit.shape[0], left : left + digit.shape[1]] = digit / digit.max()
    return frame


def _resized(image: Array, scale: float) -> Array:
    size = tuple(max(1, round(side * scale)) for side in reversed(image.shape))
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC if scale > 1 else Image.Resampling.BOX)
    return np.clip(np.asarray(resized, dtype=np.float32), 0.0, 1.0)
