"""Measures of drawn strokes whose true thickness, slant, size and place are known."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.morphology import MEASURES, measured

CENTRE = 13.5


def distance(x: Tensor, y: Tensor, across: float, down: float, lean: float) -> Tensor:
    """Distance of each pixel from a line through (across, down) that goes `lean` pixels right for each pixel up, (28, 28)."""
    return ((x - across) + lean * (y - down)).abs() / (1 + lean**2) ** 0.5


def stroke(
    thickness: float = 3, length: float = 16, lean: float = 0, across: float = CENTRE, down: float = CENTRE, rows: int = 28
) -> Tensor:
    y, x = torch.meshgrid(torch.arange(float(rows)), torch.arange(float(rows)), indexing="ij")
    ink = (distance(x, y, across, down, lean) <= thickness / 2) & ((y - down).abs() <= length / 2)
    return blurred(ink.float()[None, None])


def ring(radius: float, thickness: float) -> Tensor:
    y, x = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    r = ((x - CENTRE).square() + (y - CENTRE).square()).sqrt()
    return blurred(((r - radius).abs() <= thickness / 2).float()[None, None])


def blurred(images: Tensor) -> Tensor:
    return F.avg_pool2d(images, 3, stride=1, padding=1)


def measure(name: str, image: Tensor) -> float:
    return float(MEASURES[name](image)[0])


@pytest.mark.parametrize("thickness", [3.0, 5.0, 7.0])
def test_thickness_is_that_of_the_stroke(thickness: float) -> None:
    assert measure("stroke thickness", stroke(thickness, length=20)) == pytest.approx(thickness, rel=0.25)


@pytest.mark.parametrize("lean", [-0.5, 0.0, 0.5])
def test_slant_is_pixels_right_for_a_pixel_up(lean: float) -> None:
    assert measure("slant", stroke(lean=lean)) == pytest.approx(lean, abs=0.06)


def test_a_leaning_stroke_is_not_wider() -> None:
    assert measure("width", stroke(lean=0.5)) == pytest.approx(measure("width", stroke()), rel=0.25)


def test_width_and_height_follow_the_picture() -> None:
    tall, short = stroke(length=20), stroke(length=10)
    assert measure("height", tall) == pytest.approx(2 * measure("height", short), rel=0.15)
    assert measure("width", tall.transpose(2, 3)) == pytest.approx(2 * measure("width", short.transpose(2, 3)), rel=0.15)


def test_a_ring_is_rounder_than_a_disc_and_a_disc_than_a_stroke() -> None:
    assert measure("roundness", ring(8, 1.5)) > measure("roundness", ring(0, 16)) > measure("roundness", stroke(thickness=1))
    assert measure("roundness", ring(8, 1.5)) == pytest.approx(1, abs=0.02)


def test_positions_are_the_middle_of_the_ink_in_pixels() -> None:
    image = stroke(length=8, across=9.5, down=17.5)
    assert measure("position, left to right", image) == pytest.approx(9.5, abs=0.01)
    assert measure("position, up to down", image) == pytest.approx(17.5, abs=0.01)


def test_empty_pictures_and_colours_are_measured_too() -> None:
    assert measured(torch.zeros(2, 1, 28, 28)).isfinite().all()
    grey = stroke(rows=36)
    torch.testing.assert_close(measured(grey.expand(1, 3, 36, 36)), measured(grey), rtol=1e-3, atol=1e-3)
