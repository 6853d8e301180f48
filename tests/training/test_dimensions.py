"""Rotated axes change no answer, and do what they are named for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from service.manifest import REACH
from training.config import PRESETS, CapsuleNet, Decoder
from training.dimensions import NOTICEABLE, Poses, _dimension, aligned, clearest_pose, dimensions, poses_of_objects, rotations
from training.evaluate import TorchModel
from training.morphology import MEASURES, measured
from training.networks import Encoding, Network
from training.pairs import Batch

TINY = PRESETS["tiny"].network
CENTRE = 13.5


class Bars:
    """Draws bars of ink: one hidden direction of a pose moves them to the right, another makes them lean, others do nothing."""

    def __init__(self, size: int) -> None:
        self.right = torch.ones(size) / size**0.5
        self.lean = self.right * (-1.0) ** torch.arange(size)

    def classify(self, images: Tensor) -> Encoding:
        raise NotImplementedError

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
        right, lean = ((poses @ direction)[:, None, None] for direction in (self.right, self.lean))
        y, x = torch.meshgrid(torch.arange(28.0) - CENTRE, torch.arange(28.0) - CENTRE, indexing="ij")
        bars = (-((x - 8 * right + lean * y) ** 2) / 8 - y**2 / 32).exp()
        return bars.unsqueeze(1)


def network(config: CapsuleNet) -> Network:
    torch.manual_seed(0)
    return Network(config).eval()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sees_class", [True, False])
@pytest.mark.parametrize("hidden", [(), (10,)])
def test_rotating_the_axes_changes_no_length_or_drawing(shared: bool, sees_class: bool, hidden: tuple[int, ...]) -> None:
    assert isinstance(TINY, CapsuleNet)
    before = network(replace(TINY, share_transforms=shared, decoder=Decoder(hidden, sees_class)))
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(40) % 10
    images = torch.rand(40, 1, 28, 28, generator=generator)
    found = poses_of_objects(TorchModel(before), [Batch(images, labels[:, None], images[:, None])])
    after = aligned(before, found)
    ours, theirs = before.encoder(images), after.encoder(images)
    torch.testing.assert_close(ours.lengths, theirs.lengths)
    assert (ours.capsules - theirs.capsules).abs().max() > 1e-3  # axes were rotated
    rows = torch.arange(40)
    mine = before.decoder(ours.capsules[rows, labels], labels)
    torch.testing.assert_close(mine, after.decoder(theirs.capsules[rows, labels], labels))


def test_a_plain_network_has_no_axes_to_rotate() -> None:
    torch.manual_seed(0)
    plain = Network(PRESETS["pooled"].network)
    found = Poses(torch.rand(20, 1), torch.arange(20) % 10)
    assert dimensions(TorchModel(plain), found) == ()
    for ours, theirs in zip(plain.parameters(), aligned(plain, found).parameters(), strict=True):
        assert torch.equal(ours, theirs)


def bars() -> tuple[Bars, Poses]:
    generator = torch.Generator().manual_seed(5)
    return Bars(6), Poses(torch.randn(200, 6, generator=generator) * 0.15, torch.arange(200) % 10)


def test_the_axes_become_the_directions_that_move_and_slant_a_drawing() -> None:
    model, found = bars()
    unit = measured(model.reconstruct(found.poses, found.labels)).std(dim=0)
    (axes,) = rotations(model, [found], unit)
    torch.testing.assert_close(axes @ axes.T, torch.eye(6), atol=1e-5, rtol=0)
    # In the order of MEASURES; thickness, which comes first there, hardly changes.
    assert [int((axes @ direction).abs().argmax()) for direction in (model.lean, model.right)] == [0, 3]
    before = dimensions(model, found)
    model.right, model.lean = axes @ model.right, axes @ model.lean
    after = dimensions(model, Poses(found.poses @ axes.T, found.labels))
    for name in ("slant", "position, left to right"):
        turned, random = (max((each.strength for each in some if each.name == name), default=0) for some in (after, before))
        assert turned > random
        assert turned > 0


def test_an_axis_is_for_the_same_measure_in_every_class() -> None:
    """Even if one class hardly leans: else its later axes would all move up, and their names would be wrong for that class."""

    class Stiff(Bars):
        def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
            leans = (poses @ self.lean)[:, None] * self.lean
            return super().reconstruct(poses - 0.95 * leans * (classes == 1)[:, None], classes)

    (model, found), stiff = bars(), Stiff(6)
    groups = [Poses(found.poses, torch.full((200,), label)) for label in (0, 1)]
    unit = measured(model.reconstruct(found.poses, found.labels)).std(dim=0)
    usual, of_stiff = rotations(stiff, groups, unit)
    (alone,) = rotations(stiff, groups[1:], unit)
    moves = [int((axes @ stiff.right).abs().argmax()) for axes in (usual, of_stiff, alone)]
    assert moves[0] == moves[1] > moves[2]
    torch.testing.assert_close(of_stiff @ of_stiff.T, torch.eye(6), atol=1e-5, rtol=0)


def test_only_dimensions_with_a_clear_effect_are_named() -> None:
    model, found = bars()
    model.right, model.lean = torch.eye(6)[2], -torch.eye(6)[4]
    named = dimensions(model, found)
    assert named[2].name == "position, left to right"
    assert named[2].strength > 0
    assert named[4].name == "slant"
    assert named[4].strength < 0
    assert [each.name for index, each in enumerate(named) if index not in (2, 4)] == [""] * 4
    assert {each.name for each in named} <= {"", *MEASURES}


def test_a_dimension_with_two_equal_effects_has_no_name() -> None:
    model, found = bars()
    model.right = torch.eye(6)[2]
    assert dimensions(model, found)[2].name == "position, left to right"
    model.lean = torch.eye(6)[2]
    both = dimensions(model, found)[2]
    assert (both.name, abs(both.strength) > NOTICEABLE) == ("", True)


@pytest.mark.parametrize("spread", [0.0, 1e-7, 1e-5, 1e-3])
def test_no_dimension_is_named_where_drawings_of_a_class_hardly_differ(spread: float) -> None:
    """With one picture of each class held out, or a network that draws each class as one picture, export once went wrong."""
    model, found = bars()
    model.right, model.lean = torch.eye(6)[2], -torch.eye(6)[4]
    alike = Poses(torch.eye(10, 6).repeat(20, 1) + spread * found.poses, torch.arange(200) % 10)
    assert {each.name for each in dimensions(model, alike)} == {""}
    one_of_each = Poses(alike.poses[:10], alike.labels[:10])
    assert {(each.name, each.strength) for each in dimensions(model, one_of_each)} == {("", 0.0)}
    turned = aligned(network(TINY), Poses(torch.rand(10, 6), torch.arange(10)))  # type: ignore[arg-type]
    assert all(weights.isfinite().all() for weights in turned.parameters())


def test_an_effect_too_small_to_see_gives_no_name() -> None:
    """Drawings of a class differ in slant by 0.003 pixels a row, which nobody sees, so a hundred times as much tells nothing."""
    model, found = bars()
    model.right, model.lean = torch.eye(6)[2], -torch.eye(6)[4]
    alike = Poses(torch.eye(10, 6).repeat(20, 1) + 0.01 * found.poses, torch.arange(200) % 10)
    assert "slant" not in {each.name for each in dimensions(model, alike)}
    assert "slant" in {each.name for each in dimensions(model, Poses(alike.poses + 0.1 * found.poses, alike.labels))}


def test_the_clearest_pose_shows_best_what_its_dimensions_are_named_for() -> None:
    """The more a bar leans, the more its other measures change when it leans further."""
    model, found = bars()
    model.right, model.lean = torch.eye(6)[2], -torch.eye(6)[4]
    named = dimensions(model, found)
    leaning = found.poses.clone()
    leaning[:, 4] = torch.arange(200).sub(73).abs() / 100
    assert clearest_pose(model, Poses(leaning, found.labels), named) == 73


def test_a_dimension_with_opposite_effects_has_no_name() -> None:
    effect = torch.zeros(100, len(MEASURES))
    effect[:, 0] = 3.0
    assert _dimension(effect).name == "stroke thickness"
    effect[::2, 0], effect[1::2, 0] = 10.0, -4.0
    assert _dimension(effect).name == ""


def test_strength_is_measured_over_the_whole_reach() -> None:
    class Bump(Bars):
        def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
            x = torch.arange(60.0)
            return (-((x - 30 - 8 * poses[:, :1]) ** 2) / 8).exp()[:, None, None].expand(-1, 1, 9, -1)

    poses = torch.tensor([[-1.0, 0.0], [1.0, 0.0]]).repeat(10, 1)  # a standard deviation of 1, which is 8 pixels
    found = dimensions(Bump(2), Poses(poses, torch.zeros(20, dtype=torch.int64)))
    assert found[0].strength == pytest.approx(2 * REACH, rel=0.01)


def test_a_class_without_poses_uses_the_poses_of_all_classes() -> None:
    assert len(Poses(torch.rand(4, 2), torch.zeros(4)).of(3).poses) == 4
