"""A picture that was enlarged by repeating its pixels is recognised, and reduced to its original size."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from service.pictures.blocks import unblocked


def noise(width: int, height: int, mode: str = "L") -> Image.Image:
    levels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3)).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray(levels[..., 0].astype(np.uint16) * 257)
    return Image.fromarray(levels).convert(mode)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("side", [24, 28, 50, 75, 100, 110, 128, 1001])
def test_enlarged_pixels_are_reduced_to_the_original(side: int, mode: str) -> None:
    before = noise(8, 6, mode)
    larger = before.resize((side, side * 6 // 8), Image.Resampling.NEAREST)
    assert np.array_equal(np.asarray(unblocked(larger)), np.asarray(before))


@pytest.mark.parametrize("side", [28, 50, 75, 100, 110])
def test_pixels_enlarged_with_rounding_down_are_reduced_too(side: int) -> None:
    before = np.asarray(noise(8, 8))
    shown = np.arange(side) * 8 // side
    assert np.array_equal(np.asarray(unblocked(Image.fromarray(before[shown][:, shown]))), before)


@pytest.mark.parametrize("side", [24, 28, 100, 128, 1001])
def test_an_enlarged_mostly_blank_drawing_is_reduced_without_loss(side: int) -> None:
    before = Image.new("L", (8, 8), "white")
    before.putpixel((3, 2), 0)
    before.putpixel((4, 2), 128)
    before.putpixel((3, 3), 0)
    larger = before.resize((side, side), Image.Resampling.NEAREST)
    small = unblocked(larger)
    assert small.width == small.height < side
    assert np.array_equal(np.asarray(small.resize((side, side), Image.Resampling.NEAREST)), np.asarray(larger))


@pytest.mark.parametrize("size", [(1, 1), (2, 300), (300, 1), (100, 101)])
@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_a_blank_picture_or_a_strip_stays_blank(size: tuple[int, int], mode: str) -> None:
    small = unblocked(Image.new(mode, size, "white"))
    assert small.mode == mode
    assert np.asarray(small).size
    assert np.asarray(small).min() == np.asarray(Image.new(mode, (1, 1), "white")).max()


def test_a_picture_without_blocks_is_returned_unchanged() -> None:
    smooth = noise(8, 8).resize((100, 100), Image.Resampling.BICUBIC)
    stretched = noise(8, 8).resize((100, 60), Image.Resampling.NEAREST)
    moved = Image.fromarray(np.roll(np.asarray(noise(8, 8).resize((100, 100), Image.Resampling.NEAREST)), 5, axis=1))
    for picture in (noise(28, 28), smooth, stretched, moved):
        assert unblocked(picture) is picture
