"""The names of a sheet's rows, as a column of pixels to its left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SMALLEST, LARGEST = 9, 16  # pixels: size of the type
GAP = 6  # pixels around it
GREY = 190


def column(names: Sequence[str], height: int) -> NDArray[np.uint8]:
    """Each name in the middle of a row `height` pixels high: (rows * height, width)."""
    font = ImageFont.load_default(min(LARGEST, max(SMALLEST, height // 4)))
    width = max(round(font.getlength(name)) for name in names) + 2 * GAP
    picture = Image.new("L", (width, height * len(names)))
    draw = ImageDraw.Draw(picture)
    for row, name in enumerate(names):
        draw.text((width - GAP, row * height + height / 2), name, fill=GREY, font=font, anchor="rm")
    return np.asarray(picture)
