import pytest
import torch

from training.data import DataSet, Digits
from training.errors import DataError, UnknownNameError
from training.pairs import ARRANGEMENTS, another_class, arrangement, scaled


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_every_arrangement_fills_its_canvas_with_its_objects(name: str, data: DataSet) -> None:
    part = data.train[:16]
    batch = arrangement(name).arrange(scaled(part.images), part.labels, data.train, torch.Generator().manual_seed(0))
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
    batch = arrangement(name).arrange(scaled(data.train.images), data.train.labels, data.train, torch.Generator().manual_seed(0))
    assert (batch.labels[:, 0] != batch.labels[:, 1]).all()
    assert len(batch.labels[:, 1].unique()) == 10


def test_partners_carry_their_own_label(data: DataSet) -> None:
    images, labels = another_class(data.train.labels, data.train, torch.Generator().manual_seed(0))
    for image, label in list(zip(images, labels, strict=True))[:40]:
        same = (data.train.images == image).flatten(1).all(dim=1)
        assert label in data.train.labels[same]


def test_overlapping_digits_overlap_and_move(data: DataSet) -> None:
    part = data.train[:200]
    batch = arrangement("overlapping").arrange(scaled(part.images), part.labels, data.train, torch.Generator().manual_seed(0))
    both = (batch.targets[:, 0] > 0) & (batch.targets[:, 1] > 0)
    assert float(both.flatten(1).any(dim=1).float().mean()) > 0.9
    assert not torch.equal(batch.targets[0, 0], batch.targets[10, 0])


def test_one_class_alone_makes_no_pairs() -> None:
    alone = Digits(torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match="at least two classes, found 1"):
        another_class(alone.labels, alone, torch.Generator())


def test_unknown_pairs_list_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match="choose one of: none, overlapping, side_by_side"):
        arrangement("stacked")
