import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.augment import AUGMENTATIONS, SHIFT, moved
from training.morphology import slant


@pytest.fixture
def dots() -> Tensor:
    """One bright pixel in the middle of each picture."""
    images = torch.zeros(200, 1, 28, 28)
    images[:, :, 14, 14] = 1.0
    return images


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_keeps_shape_and_range_and_repeats_from_its_seed(name: str) -> None:
    images = torch.rand(8, 1, 28, 28)
    first, again = (AUGMENTATIONS[name](images, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.shape == images.shape
    assert float(first.min()) >= 0
    assert float(first.max()) <= 1.0001
    assert torch.equal(first, again)


def test_shift_reaches_every_whole_pixel_offset_up_to_its_limit(dots: Tensor) -> None:
    shifted = AUGMENTATIONS["shift"](dots, torch.Generator().manual_seed(0))
    assert (shifted.sum(dim=(1, 2, 3)) == 1).all()
    places = {tuple(place.tolist()) for place in (shifted[:, 0] == 1).nonzero()[:, 1:] - 14}
    assert places == {(y, x) for y in range(-SHIFT, SHIFT + 1) for x in range(-SHIFT, SHIFT + 1)}


def test_pixels_shifted_out_of_the_frame_are_lost_not_wrapped() -> None:
    images = torch.zeros(50, 1, 8, 8)
    images[:, :, 0, :] = 1.0
    shifted = moved(images, 2, torch.Generator().manual_seed(0))
    assert (shifted[:, :, 3:] == 0).all()


@pytest.mark.parametrize("name", ["affine", "strong"])
def test_affine_stays_within_its_limits(name: str, dots: Tensor) -> None:
    """Only the shift moves the centre pixel: by at most two pixels, and not always in the same direction."""
    changed = AUGMENTATIONS[name](dots, torch.Generator().manual_seed(0))
    places = changed.flatten(1).argmax(dim=1)
    offsets = torch.stack([places // 28, places % 28], dim=1) - 14
    assert int(offsets.abs().max()) <= SHIFT + 1
    assert len(offsets.unique(dim=0)) > 10


def bars(count: int) -> Tensor:
    images = torch.zeros(count, 1, 28, 28)
    images[:, :, 4:24, 13:15] = 1.0
    return images


@pytest.mark.parametrize("pad", [(42, 42, 0, 0), (0, 0, 42, 42)], ids=["wide", "tall"])
@pytest.mark.parametrize("name", ["affine", "strong"])
def test_a_digit_is_augmented_alike_in_square_and_oblong_pictures(name: str, pad: tuple[int, ...]) -> None:
    square, longer = (
        AUGMENTATIONS[name](images, torch.Generator().manual_seed(0)) for images in (bars(20), F.pad(bars(20), pad))
    )
    top, left = pad[2], pad[0]
    assert torch.allclose(longer[:, :, top : top + 28, left : left + 28], square, atol=1e-4)


@pytest.mark.parametrize("name", ["affine", "strong"])
def test_affine_differs_between_pictures_of_a_batch(name: str) -> None:
    changed = AUGMENTATIONS[name](bars(4), torch.Generator().manual_seed(0))
    assert not any(torch.allclose(changed[0], other) for other in changed[1:])


def test_strong_slants_one_and_a_half_times_as_far_as_affine() -> None:
    affine, strong = (slant(AUGMENTATIONS[name](bars(2000), torch.Generator().manual_seed(0))) for name in ("affine", "strong"))
    assert float(strong.std() / affine.std()) == pytest.approx(1.5, abs=0.15)


@pytest.mark.parametrize(("name", "turn", "scale", "shear"), [("affine", 12, 0.12, 0.15), ("strong", 18, 0.18, 0.25)])
def test_affine_reaches_the_limits_of_every_transformation(name: str, turn: float, scale: float, shear: float) -> None:
    """The value of each pixel is its position, so the middle of an augmented picture tells what was sampled there."""
    at = torch.arange(41.0).expand(41, 41) / 40
    made = (AUGMENTATIONS[name](ramp.expand(2000, 1, 41, 41), torch.Generator().manual_seed(0)) for ramp in (at, at.T))
    across, down = (each[:, 0] * 40 for each in made)
    for ramp in (across, down):
        assert float((ramp[:, 20, 20] - 20).min()) == pytest.approx(-2, abs=0.02)
        assert float((ramp[:, 20, 20] - 20).max()) == pytest.approx(2, abs=0.02)
    a, b = across[:, 20, 21] - across[:, 20, 20], across[:, 21, 20] - across[:, 20, 20]
    c, d = down[:, 20, 21] - down[:, 20, 20], down[:, 21, 20] - down[:, 20, 20]
    wide = torch.hypot(a, c)
    high = (a * d - b * c) / wide
    found = {turn: torch.rad2deg(torch.atan2(c, a)), scale: wide - 1, -scale: high - 1, shear: (a * b + c * d) / wide / high}
    for limit, values in found.items():
        assert float(values.min()) == pytest.approx(-abs(limit), rel=0.02)
        assert float(values.max()) == pytest.approx(abs(limit), rel=0.02)
    assert torch.corrcoef(torch.stack(list(found.values()))).fill_diagonal_(0).abs().max() < 0.1  # all independent


def test_shifts_are_of_up_to_two_pixels_as_in_the_paper() -> None:
    dot = torch.zeros(500, 1, 28, 28)
    dot[:, :, 14, 14] = 1.0
    places = AUGMENTATIONS["shift"](dot, torch.Generator().manual_seed(0)).flatten(1).argmax(dim=1)
    assert {int(place) // 28 - 14 for place in places} == {int(place) % 28 - 14 for place in places} == {-2, -1, 0, 1, 2}


def test_pixels_from_outside_the_frame_are_black() -> None:
    made = AUGMENTATIONS["affine"](torch.ones(50, 1, 28, 28), torch.Generator().manual_seed(0))
    assert (made.amin(dim=(1, 2, 3)) < 0.5).float().mean() > 0.5
