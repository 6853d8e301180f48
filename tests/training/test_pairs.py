import pytest
import torch

from training.augment import AUGMENTATIONS, none
from training.data import DataSet, Digits
from training.errors import DataError, UnknownNameError
from training.pairs import ARRANGEMENTS, Partners, arrangement, scaled


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_every_arrangement_fills_its_canvas_with_its_objects(name: str, data: DataSet) -> None:
    part = data.train[:16]
    batch = arrangement(name).arrange(part, Partners(data.train), none, torch.Generator().manual_seed(0))
    height, width = ARRANGEMENTS[name].canvas(28, 28)
    objects = ARRANGEMENTS[name].objects
    assert batch.images.shape == (16, 1, height, width)
    assert batch.labels.shape == (16, objects)
    assert batch.targets.shape == (16, objects, 1, height, width)
    assert float(batch.images.max()) <= 1
    torch.testing.assert_close(batch.targets.sum(dim=1).clamp_max(1), batch.images)
    assert torch.equal(batch.labels[:, 0], part.labels)


@pytest.mark.parametrize("name", ["overlapping", "side_by_side"])
def test_pairs_are_of_different_classes(name: str, data: DataSet) -> None:
    batch = arrangement(name).arrange(data.train, Partners(data.train), none, torch.Generator().manual_seed(0))
    assert (batch.labels[:, 0] != batch.labels[:, 1]).all()
    assert len(batch.labels[:, 1].unique()) == 10


def test_each_target_is_the_picture_of_its_label(data: DataSet) -> None:
    """Side by side the first object is the left half, the second the right; each is a picture of the data with that label."""
    part = data.train[:30]
    batch = arrangement("side_by_side").arrange(part, Partners(data.train), none, torch.Generator().manual_seed(0))
    for index in range(2):
        halves = batch.targets[:, index].split(28, dim=-1)[index]
        for half, label in zip(halves, batch.labels[:, index], strict=True):
            same = (scaled(data.train.images) == half).flatten(1).all(dim=1)
            assert label in data.train.labels[same]
        assert (batch.targets[:, index].split(28, dim=-1)[1 - index] == 0).all()


@pytest.mark.parametrize("augment", ["none", "shift"])
def test_both_overlapping_digits_move_up_to_four_pixels_whatever_the_augmentation(augment: str) -> None:
    """A dot in the middle of every digit: where it lands tells the shift."""
    images = torch.zeros(2_000, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 14, 14] = 255
    dots = Digits(images, torch.arange(2_000) % 10)
    batch = arrangement("overlapping").arrange(dots, Partners(dots), AUGMENTATIONS[augment], torch.Generator().manual_seed(0))
    places = [(batch.targets[:, index, 0] == 1).nonzero()[:, 1:] - 18 for index in range(2)]
    for each in places:
        assert (int(each.min()), int(each.max())) == (-4, 4)
        assert len(each.unique(dim=0)) == 81
    frames = (28 - (places[0] - places[1]).abs()).prod(dim=1) / 28**2  # how much of a digit's frame the other's covers
    assert float(frames.mean()) == pytest.approx(0.8, abs=0.01)  # as in the paper


def test_both_digits_of_a_pair_are_augmented() -> None:
    images = torch.zeros(1_000, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 14, 14] = 255
    dots = Digits(images, torch.arange(1_000) % 10)
    batch = arrangement("side_by_side").arrange(dots, Partners(dots), AUGMENTATIONS["shift"], torch.Generator().manual_seed(0))
    for index in range(2):
        assert len((batch.targets[:, index, 0] == 1).nonzero()[:, 1:].unique(dim=0)) == 25


def test_partners_carry_their_own_label(data: DataSet) -> None:
    others = Partners(data.train).of_another_class(data.train.labels, torch.Generator().manual_seed(0))
    for image, label in list(zip(others.images, others.labels, strict=True))[:40]:
        same = (data.train.images == image).flatten(1).all(dim=1)
        assert label in data.train.labels[same]


def test_overlapping_digits_overlap_and_move(data: DataSet) -> None:
    part = data.train[:200]
    batch = arrangement("overlapping").arrange(part, Partners(data.train), none, torch.Generator().manual_seed(0))
    both = (batch.targets[:, 0] > 0) & (batch.targets[:, 1] > 0)
    assert float(both.flatten(1).any(dim=1).float().mean()) > 0.9
    assert not torch.equal(batch.targets[0, 0], batch.targets[10, 0])


def test_pairs_of_a_single_class_are_rejected() -> None:
    alone = Digits(torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match="at least two classes, found 1"):
        Partners(alone).of_another_class(alone.labels, torch.Generator())


def test_unknown_pairs_list_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match="choose one of: none, overlapping, side_by_side"):
        arrangement("stacked")


def test_partners_are_all_pictures_of_other_classes() -> None:
    digits = Digits(torch.arange(40, dtype=torch.uint8).reshape(40, 1, 1, 1), torch.arange(40) % 2)
    found = Partners(digits).of_another_class(torch.zeros(2000, dtype=torch.int64), torch.Generator().manual_seed(0))
    counts = found.images.flatten().bincount(minlength=40)
    assert (counts[1::2] > 50).all()
    assert not counts[::2].any()
