import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.capsules import PrimaryCapsules
from training.config import PRESETS, Primary
from training.networks import Network
from training.spectral import SpectralConv2d, convolve, points

SHAPES = [(20, 9, 2), (21, 9, 2), (21, 8, 2), (28, 9, 1), (16, 7, 3), (9, 9, 1), (12, 8, 4)]


def both(size: int, kernel: int, stride: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What F.conv2d and convolve give, each with the gradients of images and kernels."""
    torch.manual_seed(size)
    images, kernels = torch.randn(3, 5, size, size), torch.randn(4, 5, kernel, kernel)
    answers = []
    for convolution in (lambda a, b: F.conv2d(a, b, stride=stride), lambda a, b: convolve(a, b, stride)):
        given = images.clone().requires_grad_(), kernels.clone().requires_grad_()
        found = convolution(*given)
        weights = torch.linspace(-1, 1, found.numel()).view_as(found)
        answers.append((found, *torch.autograd.grad((found * weights).sum(), given)))
    return answers[0], answers[1]


@pytest.mark.parametrize(("size", "kernel", "stride"), SHAPES)
def test_convolves_as_torch_does_with_its_gradients(size: int, kernel: int, stride: int) -> None:
    for expected, found in zip(*both(size, kernel, stride), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


def test_multiplies_at_a_fifth_of_the_places_for_paper() -> None:
    reads, weighs, writes = points(10, 5)
    assert (reads.shape, weighs.shape, writes.shape) == ((148, 100), (148, 25), (36, 148))
    assert 4 * len(reads) < 36 * 81 / 4.9


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with each use of spectra."""
    used: list[bool] = []
    monkeypatch.setattr("training.spectral.convolve", lambda *given: used.append(True) or convolve(*given))
    return used


def test_is_used_to_train_in_float32_on_a_cpu_and_nowhere_else(used: list[bool]) -> None:
    layer, images = SpectralConv2d(2, 3, 9, 2), torch.rand(1, 2, 20, 20)
    trained = layer(images)
    assert used == [True]
    torch.testing.assert_close(layer.eval()(images), trained)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.train()(images).dtype == torch.bfloat16
    layer.double()(images.double())
    assert used == [True]


@pytest.mark.parametrize(("height", "width"), [(20, 48), (16, 16), (42, 42)])
def test_pictures_that_are_not_square_too_small_or_too_large_are_convolved_directly(
    height: int, width: int, used: list[bool]
) -> None:
    layer, images = SpectralConv2d(2, 3, 9, 2), torch.rand(1, 2, height, width)
    torch.testing.assert_close(layer(images), F.conv2d(images, layer.weight, layer.bias, stride=2))
    assert not used


@pytest.mark.parametrize(("name", "pays"), [("paper", True), ("compact", False), ("compact16", False)])
def test_of_large_kernels_those_that_see_all_channels_pay(name: str, pays: bool, used: list[bool]) -> None:
    """`compact16` has 9x9 kernels too, but for one channel each."""
    network = Network(PRESETS[name].network)
    network(torch.rand(2, *PRESETS[name].network.image_shape), torch.tensor([[0], [1]]))
    assert bool(used) == pays


def test_its_weights_are_those_of_any_convolution() -> None:
    layer = PrimaryCapsules(16, Primary(kinds=2, size=8, kernel=9, stride=2), "paper")
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "convolution.weight": (16, 16, 9, 9),
        "convolution.bias": (16,),
    }
