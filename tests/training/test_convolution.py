from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training import spectral, unfolded
from training.capsules import PrimaryCapsules
from training.config import PRESETS, Primary
from training.convolution import LargeConv2d
from training.networks import Network

WAYS = [spectral, unfolded]
SHAPES = [(20, 9, 2), (21, 9, 2), (21, 8, 2), (28, 9, 1), (16, 7, 3), (9, 9, 1), (12, 8, 4)]


def both(
    way: ModuleType, sides: tuple[int, int], kernel: int, stride: int, memory: torch.memory_format
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What F.conv2d and this way give, each with the gradients of images and kernels."""
    torch.manual_seed(sum(sides))
    images, kernels = (torch.randn(shape).to(memory_format=memory) for shape in ((3, 5, *sides), (4, 5, kernel, kernel)))
    answers = []
    for convolution in (lambda a, b: F.conv2d(a, b, stride=stride), lambda a, b: way.convolve(a, b, stride)):
        given = images.clone().requires_grad_(), kernels.clone().requires_grad_()
        found = convolution(*given)
        weights = torch.linspace(-1, 1, found.numel()).view_as(found)
        answers.append((found, *torch.autograd.grad((found * weights).sum(), given)))
    return answers[0], answers[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("size", "kernel", "stride"), SHAPES)
def test_convolves_as_torch_does_with_its_gradients(
    way: ModuleType, size: int, kernel: int, stride: int, memory: torch.memory_format
) -> None:
    for expected, found in zip(*both(way, (size, size), kernel, stride, memory), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


def test_unfolded_pictures_need_not_be_square() -> None:
    for expected, found in zip(*both(unfolded, (11, 19), 7, 2, torch.channels_last), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


def test_spectra_multiply_at_a_fifth_of_the_places_for_paper() -> None:
    reads, weighs, writes = spectral.points(10, 5)
    assert (reads.shape, weighs.shape, writes.shape) == ((148, 100), (148, 25), (36, 148))
    assert 4 * len(reads) < 36 * 81 / 4.9


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each use of a way that is not torch's."""
    used: list[str] = []
    for way in WAYS:

        def convolve(*given: object, way: ModuleType = way, convolve: object = way.convolve) -> object:
            used.append(way.__name__.removeprefix("training."))
            return convolve(*given)  # type: ignore[operator]

        monkeypatch.setattr(way, "convolve", convolve)
    return used


def test_what_is_trained_on_a_cpu_is_convolved_as_its_precision_wants_and_all_else_directly(used: list[str]) -> None:
    layer, images = LargeConv2d(2, 3, 9, 2), torch.rand(1, 2, 20, 20)
    trained = layer(images)
    assert used == ["spectral"]
    torch.testing.assert_close(layer.eval()(images), trained)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(images).dtype == torch.bfloat16
        assert used == ["spectral"]
        half = layer.train()(images)
    assert used == ["spectral", "unfolded"]
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), trained, atol=0.02, rtol=0)
    layer.double()(images.double())
    assert used == ["spectral", "unfolded"]


def test_bfloat16_learns_what_float32_does(used: list[str]) -> None:
    """The gradients of pictures, kernels and bias."""
    torch.manual_seed(0)
    layer, images = LargeConv2d(4, 8, 9, 2), torch.rand(16, 4, 20, 20)
    gradients = []
    for enabled in (False, True):
        given = images.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = layer(given)
        found.float().square().sum().backward()
        gradients.append([each.grad.clone() for each in (given, layer.weight, layer.bias)])
    assert used == ["spectral", "unfolded"]
    for expected, gradient in zip(*gradients, strict=True):
        assert (gradient - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(("height", "width"), [(20, 48), (16, 16), (42, 42)])
def test_pictures_that_are_not_square_too_small_or_too_large_for_spectra(height: int, width: int, used: list[str]) -> None:
    layer, images = LargeConv2d(2, 3, 9, 2), torch.rand(1, 2, height, width)
    torch.testing.assert_close(layer(images), F.conv2d(images, layer.weight, layer.bias, stride=2))
    assert not used


@pytest.mark.parametrize(("side", "stride", "copied"), [(28, 2, True), (36, 2, False), (36, 1, False), (9, 2, True)])
def test_pictures_whose_copies_would_fill_the_memory_are_convolved_directly(
    side: int, stride: int, copied: bool, used: list[str]
) -> None:
    """A kernel of 9x9 at every second pixel sees each up to 25 times, those at the edge less often."""
    layer, images = LargeConv2d(2, 3, 9, stride), torch.rand(1, 2, side, side)
    with torch.autocast("cpu", torch.bfloat16):
        layer(images)
    assert used == ["unfolded"] * copied


@pytest.mark.parametrize(("name", "pays"), [("paper", True), ("compact", False), ("compact16", False)])
def test_of_large_kernels_those_that_see_all_channels_pay(name: str, pays: bool, used: list[str]) -> None:
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
