import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training import spectral
from training.capsules import PrimaryCapsules
from training.config import PRESETS, Primary
from training.convolution import LargeConv2d
from training.networks import Network

SHAPES = [(20, 9, 2), (21, 9, 2), (21, 8, 2), (28, 9, 1), (16, 7, 3), (9, 9, 1), (12, 8, 4)]


def both(
    size: int, kernel: int, stride: int, memory: torch.memory_format, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Results of F.conv2d in float32 and of spectra in `dtype`, each with the gradients of images and kernels."""
    torch.manual_seed(size)
    images, kernels = (torch.randn(shape).to(memory_format=memory) for shape in ((3, 5, size, size), (4, 5, kernel, kernel)))
    answers = []
    for convolution, precision in (
        (lambda a, b: F.conv2d(a, b, stride=stride), torch.float32),
        (lambda a, b: spectral.convolve(a, b, stride), dtype),
    ):
        given = images.to(precision, copy=True).requires_grad_(), kernels.to(precision, copy=True).requires_grad_()
        found = convolution(*given)
        weights = torch.linspace(-1, 1, found.numel()).view_as(found)
        answers.append((found, *torch.autograd.grad((found * weights).sum(), given)))
    return answers[0], answers[1]


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("size", "kernel", "stride"), SHAPES)
def test_spectral_convolution_and_its_gradients_match_torch(
    size: int, kernel: int, stride: int, memory: torch.memory_format
) -> None:
    for expected, found in zip(*both(size, kernel, stride, memory), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("size", "kernel", "stride"), SHAPES)
def test_in_bfloat16_results_and_gradients_are_within_two_percent(size: int, kernel: int, stride: int) -> None:
    for expected, found in zip(*both(size, kernel, stride, torch.channels_last, torch.bfloat16), strict=True):
        assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_gradients_have_the_memory_format_of_the_pictures() -> None:
    """Otherwise the ReLU before it would read them out of order."""
    images = torch.rand(2, 16, 20, 20).to(memory_format=torch.channels_last).requires_grad_()
    spectral.convolve(images, torch.rand(8, 16, 9, 9), 2).sum().backward()
    assert images.grad is not None
    assert images.grad.is_contiguous(memory_format=torch.channels_last)


def test_spectra_need_a_fifth_of_the_multiplications_for_paper() -> None:
    reads, weighs, writes = spectral.points(10, 5)
    assert (reads.shape, weighs.shape, writes.shape) == ((148, 100), (148, 25), (36, 148))
    assert 4 * len(reads) < 36 * 81 / 4.9


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Collects the precision of each use of spectra."""
    used: list[torch.dtype] = []
    convolve = spectral.convolve

    def noted(images: Tensor, kernels: Tensor, stride: int) -> Tensor:
        used.append(images.dtype)
        return convolve(images, kernels, stride)

    monkeypatch.setattr(spectral, "convolve", noted)
    return used


def test_only_training_in_float32_or_bfloat16_uses_spectra(used: list[torch.dtype]) -> None:
    layer, images = LargeConv2d(2, 3, 9, 2), torch.rand(1, 2, 20, 20)
    trained = layer(images)
    assert used == [torch.float32]
    torch.testing.assert_close(layer.eval()(images), trained)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(images).dtype == torch.bfloat16
        assert used == [torch.float32]
        half = layer.train()(images)
    assert used == [torch.float32, torch.bfloat16]
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), trained, atol=0.02, rtol=0)
    layer.double()(images.double())
    assert len(used) == 2


def test_gradients_in_bfloat16_are_close_to_those_in_float32(used: list[torch.dtype]) -> None:
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
    assert used == [torch.float32, torch.bfloat16]
    for expected, gradient in zip(*gradients, strict=True):
        assert (gradient - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("height", "width"), [(20, 48), (16, 16), (42, 42)])
def test_pictures_unsuited_to_spectra_are_convolved_directly(
    height: int, width: int, dtype: torch.dtype, used: list[torch.dtype]
) -> None:
    layer, images = LargeConv2d(2, 3, 9, 2).to(dtype), torch.rand(1, 2, height, width, dtype=dtype)
    torch.testing.assert_close(layer(images), F.conv2d(images, layer.weight, layer.bias, stride=2))
    assert not used


@pytest.mark.parametrize(("name", "pays"), [("paper", True), ("compact", False), ("compact16", False)])
def test_only_large_kernels_over_all_channels_use_spectra(name: str, pays: bool, used: list[torch.dtype]) -> None:
    """`compact16` has 9x9 kernels too, but for one channel each."""
    network = Network(PRESETS[name].network)
    network(torch.rand(2, *PRESETS[name].network.image_shape), torch.tensor([[0], [1]]))
    assert bool(used) == pays


def test_weights_have_the_names_and_shapes_of_a_plain_convolution() -> None:
    layer = PrimaryCapsules(16, Primary(kinds=2, size=8, kernel=9, stride=2), "paper")
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "convolution.weight": (16, 16, 9, 9),
        "convolution.bias": (16,),
    }
