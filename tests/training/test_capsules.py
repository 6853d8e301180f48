from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.capsules import SQUASH_CONSTANTS, ClassCapsules, PrimaryCapsules, Squash
from training.config import PRESETS, CapsuleNet, Conv, Primary
from training.errors import SettingError, UnknownNameError
from training.routing import ROUTINGS, lengths


def class_capsules(inputs: int = 20, *, shared: bool = False, routing: str = "dynamic", scale: float = 1.0) -> ClassCapsules:
    stem, primary = (Conv(8, kernel=3),), Primary(kinds=1, size=8)
    return ClassCapsules(inputs, CapsuleNet(stem, primary, routing=routing, share_transforms=shared, transform_scale=scale))


def named(layer: ClassCapsules, capsules: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = layer(layer.votes(capsules))
    return found


@pytest.mark.parametrize(("name", "length"), [("paper", 4 / 5), ("half", 4 / 4.5)])
def test_squash_keeps_direction_and_maps_length(name: str, length: float) -> None:
    squashed = Squash(name)(torch.tensor([[2.0, 0.0, 0.0]]))
    torch.testing.assert_close(squashed, torch.tensor([[length, 0.0, 0.0]]))


@pytest.mark.parametrize("name", SQUASH_CONSTANTS)
def test_squash_has_a_finite_gradient_at_zero(name: str) -> None:
    vectors = torch.zeros(2, 8, requires_grad=True)
    lengths(Squash(name)(vectors)).sum().backward()
    assert vectors.grad is not None
    assert vectors.grad.isfinite().all()


def test_a_primary_capsule_is_eight_channels_at_one_place() -> None:
    """Mark one place of the feature map: exactly the capsules of that place see it, each in all of its values."""
    layer = PrimaryCapsules(256, Primary(kinds=32, size=8, kernel=9, stride=2), "paper")
    assert isinstance(layer.convolution, nn.Conv2d)
    layer.convolution = nn.Identity()
    features = torch.zeros(1, 256, 6, 6)
    features[0, :, 2, 3] = 1.0
    capsules = layer(features)
    assert capsules.shape == (1, 6 * 6 * 32, 8)
    marked = (capsules[0] != 0).all(dim=1)
    assert marked.nonzero().flatten().tolist() == [(2 * 6 + 3) * 32 + kind for kind in range(32)]
    assert (capsules[0][~marked] == 0).all()


def test_a_capsule_takes_neighbouring_channels() -> None:
    layer = PrimaryCapsules(256, Primary(kinds=32, size=8, kernel=9, stride=2, squash=False), "paper")
    layer.convolution = nn.Identity()
    channels = torch.arange(256.0).reshape(1, 256, 1, 1)
    assert layer(channels)[0, 3].tolist() == [24.0, 25.0, 26.0, 27.0, 28.0, 29.0, 30.0, 31.0]


def test_without_a_convolution_the_stems_channels_become_capsules() -> None:
    layer = PrimaryCapsules(128, Primary(kinds=16, size=8), "paper")
    assert layer(torch.zeros(2, 128, 3, 3)).shape == (2, 3 * 3 * 16, 8)


@pytest.mark.parametrize(
    ("primary", "message"),
    [
        (Primary(kinds=32, size=8), "expected 32 kinds x 8 = 256 of them, found 128"),
        (Primary(kinds=10, size=12), "expected 10 kinds x 12 = 120 of them, found 128"),  # a capsule would span two places
        (Primary(kinds=24, size=8, kernel=9, depthwise=True), "192 to be a multiple of the stem's 128"),
    ],
)
def test_capsules_that_do_not_fit_the_stems_channels_are_rejected(primary: Primary, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        PrimaryCapsules(128, primary, "paper")


@pytest.mark.parametrize("shared", [False, True])
def test_votes_are_inputs_times_their_transformation_matrices(shared: bool) -> None:
    layer = class_capsules(shared=shared)
    capsules = torch.randn(3, 20, 8)
    transforms = layer.transforms.reshape(*layer.transforms.shape[:-1], 10, 16)
    equation = "nid,dop->noip" if shared else "nid,idop->noip"
    torch.testing.assert_close(layer.votes(capsules), torch.einsum(equation, capsules, transforms))


def test_a_small_transform_scale_starts_capsules_at_medium_lengths() -> None:
    """With 1,152 votes at Glorot's scale, noise alone makes capsules of length 1."""
    torch.manual_seed(0)
    capsules = nn.functional.normalize(torch.randn(4, 1152, 8), dim=2)
    sure, undecided = (lengths(named(class_capsules(1152, scale=scale), capsules)).mean() for scale in (1.0, 0.2))
    assert sure > 0.95
    assert 0.1 < undecided < 0.6


def test_no_tensor_of_a_step_is_larger_than_the_votes() -> None:
    """No tensor of a training step is larger than the votes themselves, (batch, out, in, pose)."""
    layer, batch = class_capsules(inputs=64), 16  # more pictures than values in a capsule, else the weights are larger

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.size = max(self.size, *sizes, 0)
            return result

    with Largest() as seen:
        lengths(named(layer, torch.randn(batch, 64, 8))).sum().backward()
    assert seen.size == batch * 10 * 64 * 16


def test_votes_and_routing_stay_in_float32_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert named(class_capsules(), torch.randn(2, 20, 8)).dtype == torch.float32


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown routing 'nonsense'; choose one of: " + ", ".join(sorted(ROUTINGS))):
        class_capsules(routing="nonsense")
    with pytest.raises(UnknownNameError, match="unknown squash 'flat'; choose one of: half, paper"):
        Squash("flat")


def test_transformations_are_initialised_by_glorots_rule() -> None:
    torch.manual_seed(0)
    network = PRESETS["paper"].network
    assert isinstance(network, CapsuleNet)
    assert float(ClassCapsules(200, network).transforms.detach().std()) == pytest.approx((2 / (8 + 16)) ** 0.5, rel=0.02)
