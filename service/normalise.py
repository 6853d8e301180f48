"""Any picture of a digit -> one that looks like the training set. Knows no model.

MNIST was made so: the digit, light on black, fitted into a 20x20 box with its proportions kept and its edges smooth, then
placed with its centre of mass in the middle of 28x28 pixels. So a picture goes through: colours -> ink -> digit -> box.
One that already is made so is recognised and left alone.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFilter

from service.blots import Array, stroke_width
from service.ink import ink_of

BOX = 20 / 28  # of the frame's side: the longer side of the digit
CENTRED = 0.51  # pixels: how far from the middle rounding may have left the centre of mass
FINE = 5  # the digit's strokes are judged and mended at so many times the final size

# Widths of strokes in final pixels. Nearly all of MNIST's lie between these; others are drawn to the nearer.
THINNEST, THICKEST = 2.0, 2.8


def pixels(picture: Image.Image, channels: int = 1) -> Array:
    """(C, H, W) in [0, 1] with nothing changed but the number format; what is transparent is black."""
    if picture.mode.startswith("I"):  # 16 bits of grey: Pillow's own conversion clips at 255 in place of scaling
        grey = np.asarray(picture, dtype=np.float32)[None] / 65535
        return np.repeat(np.clip(grey, 0.0, 1.0), channels, axis=0).astype(np.float32)
    if picture.mode not in ("1", "L", "RGB"):
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "black"), picture)
    levels = np.asarray(picture.convert("L" if channels == 1 else "RGB"), dtype=np.float32)
    levels *= np.float32(1 / 255)
    return levels[None] if channels == 1 else np.ascontiguousarray(levels.transpose(2, 0, 1))


def normalise(picture: Image.Image, height: int, width: int) -> Array:
    """(H, W) in [0, 1]; black where there is nothing to be seen."""
    if picture.size == (width, height) and picture.mode in ("1", "L", "RGB", "P"):
        grey = pixels(picture)[0]
        for image in (grey, 1 - grey):
            if _as_trained(image):
                return image
    return _framed(_mended(ink_of(picture), BOX * min(height, width)), height, width)


def _as_trained(image: Array) -> bool:
    """Black around a digit that fills the box, its mass in the middle."""
    height, width = image.shape
    if image[0, 0] > 0:  # of two polarities one ends here
        return False
    rows, columns = np.flatnonzero(image.any(axis=1)), np.flatnonzero(image.any(axis=0))
    if not len(rows):
        return False
    if abs(max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1 - BOX * min(height, width)) > 1:
        return False
    y, x = _centre(image)
    return abs(y - height / 2) < CENTRED and abs(x - width / 2) < CENTRED


def _centre(image: Array) -> tuple[float, float]:
    """Of mass, as index of a pixel: a frame of 28 has its middle at 14, as the training set's authors counted."""
    down, across = image.sum(axis=1), image.sum(axis=0)
    mass = float(down.sum())
    return float(down @ np.arange(len(down))) / mass, float(across @ np.arange(len(across))) / mass


def _mended(ink: Array, box: float) -> Array:
    """The digit alone, fitted into the box, its strokes of a width the network has seen."""
    rows, columns = np.flatnonzero(ink.max(axis=1) > 0.5), np.flatnonzero(ink.max(axis=0) > 0.5)
    if not len(rows):
        return ink[:0, :0]
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = FINE * box / max(ink.shape)
    fine = _resized(np.pad(ink, 1), scale)
    stroke = stroke_width(fine) / FINE
    missing = THINNEST - stroke if stroke < THINNEST else min(0.0, THICKEST - stroke)
    reach = round(abs(missing) * FINE / 2)
    if reach:
        mended = Image.fromarray(np.pad(fine * 255, reach).astype(np.uint8))
        kind = ImageFilter.MaxFilter if missing > 0 else ImageFilter.MinFilter
        fine = np.asarray(mended.filter(kind(2 * reach + 1)), dtype=np.float32) / 255
        rows, columns = np.flatnonzero(fine.max(axis=1) > 0.5), np.flatnonzero(fine.max(axis=0) > 0.5)
        if not len(rows):
            return ink[:0, :0]
        fine = fine[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return _resized(fine, box / max(fine.shape))


def _framed(digit: Array, height: int, width: int) -> Array:
    """With its centre of mass in the middle, as far as it then stays inside."""
    frame = np.zeros((height, width), np.float32)
    if not digit.size or not digit.any():
        return frame
    y, x = _centre(digit)
    top = min(max(round(height / 2 - y), 0), height - digit.shape[0])
    left = min(max(round(width / 2 - x), 0), width - digit.shape[1])
    frame[top : top + digit.shape[0], left : left + digit.shape[1]] = digit / digit.max()
    return frame


def _resized(image: Array, scale: float) -> Array:
    size = tuple(max(1, round(side * scale)) for side in reversed(image.shape))
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC if scale > 1 else Image.Resampling.BOX)
    return np.clip(np.asarray(resized, dtype=np.float32), 0.0, 1.0)
