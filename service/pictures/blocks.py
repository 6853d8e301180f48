"""Undoes an enlargement that repeated pixels: the corners of such blocks are not the writer's. Knows nothing about digits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LARGEST = 1024  # pixels of the longer side; larger pictures are not made by repeating pixels
FEW = 8  # lines spread over a picture, which are enough to tell for most that they have no blocks
UNEVEN = 3  # pixels: blocks that are not all of the same size are at least this large

Places = NDArray[np.intp]


def unblocked(picture: Image.Image) -> Image.Image:
    """One pixel for each block; the picture itself if it has none."""
    if (
        picture.mode not in ("1", "L", "LA", "RGB", "RGBA", "I;16")
        or "transparency" in picture.info
        or max(picture.size) > LARGEST
    ):
        return picture
    levels = np.asarray(picture)
    height, width = levels.shape[:2]
    few = levels[:, :: max(1, width // FEW)], levels[:: max(1, height // FEW)].swapaxes(0, 1)
    if any(_narrowest(_edges(lines), len(lines)) == 1 for lines in few):
        return picture
    sides = [(_edges(lines), len(lines)) for lines in (levels, levels.swapaxes(0, 1))]  # down, across
    even = math.gcd(*picture.size, *(int(edge) for edges, _ in sides for edge in edges))
    if even > 1:
        return Image.fromarray(levels[::even, ::even])
    middles = _middles(sides)
    return picture if middles is None else Image.fromarray(levels[middles[0]][:, middles[1]])


def _edges(lines: NDArray[np.generic]) -> Places:
    """The indices of lines that differ from the one before them."""
    flat = lines.reshape(len(lines), -1)
    return 1 + np.flatnonzero((flat[1:] != flat[:-1]).any(axis=1))


def _narrowest(edges: Places, size: int) -> int:
    return int(np.diff(edges, prepend=0, append=size).min())


def _middles(sides: Sequence[tuple[Places, int]]) -> list[Places] | None:
    """For blocks whose sizes differ by at most a pixel, the index of a line through each: down and across."""
    narrowest, longer = min(_narrowest(edges, size) for edges, size in sides), max(size for _, size in sides)
    if narrowest < UNEVEN:
        return None
    for many in range(longer // (narrowest + 1) + 1, longer // narrowest + 1):
        counts = [round(size * many / longer) for _, size in sides]
        if all(_all_begin_blocks(edges, size / count) for (edges, size), count in zip(sides, counts, strict=True)):
            return [
                ((np.arange(count) + 0.5) * size / count).astype(np.intp) for (_, size), count in zip(sides, counts, strict=True)
            ]
    return None


def _all_begin_blocks(edges: Places, block: float) -> bool:
    """Whether all edges begin a block, if each pixel shows the block that its middle lies in, or else its beginning."""
    after = edges - np.rint(edges / block) * block
    return bool((abs(after) <= 0.5).all() or ((after >= 0) & (after < 1)).all())
