"""Any picture of a digit -> one that looks like the training set. Knows no model.

MNIST was made so: the digit, light on black, fitted into a 20x20 box with its proportions kept and its edges smooth,
then placed with its centre of mass in the middle of 28x28 pixels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.float32]


def pixels(picture: Image.Image, channels: int = 1) -> Array:
    """(C, H, W) in [0, 1] with nothing changed but the number format; what is transparent is black."""
    if picture.mode.startswith("I"):  # 16 bits of grey: Pillow's own conversion clips at 255 in place of scaling
        grey = np.asarray(picture, dtype=np.float32)[None] / 65535
        return np.repeat(np.clip(grey, 0.0, 1.0), channels, axis=0).astype(np.float32)
    if picture.mode not in ("1", "L", "RGB"):
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "black"), picture)
    levels: Array = np.asarray(picture.convert("L" if channels == 1 else "RGB"), dtype=np.float32) / np.float32(255)
    return levels[None] if channels == 1 else np.ascontiguousarray(levels.transpose(2, 0, 1))


def normalise(picture: Image.Image, height: int, width: int) -> Array:
    return pixels(picture.resize((width, height)))[0]
