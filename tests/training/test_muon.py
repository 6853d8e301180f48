"""Steps have the same length in every direction: singular values are near one, whatever the gradient's were."""

import pytest
import torch

from training.config import PRESETS
from training.muon import MOMENTUM, Muon, orthogonal
from training.networks import Network, convolutions, transforms


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (3, 5, 8, 16), (64, 800), (256, 20_736)])
def test_orthogonal_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    steep = torch.logspace(0, -1.5, shape[-1])  # the last directions are a thirtieth of the first
    found = torch.linalg.svdvals(orthogonal(torch.randn(shape) * steep))
    assert found.min() > 0.5
    assert found.max() < 1.3


def test_orthogonal_keeps_the_singular_directions() -> None:
    torch.manual_seed(0)
    given = torch.randn(8, 16)
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    along = left.mT @ orthogonal(given) @ right.mT
    assert (along - torch.diag(along.diagonal())).abs().max() < 1e-4


def test_a_zero_gradient_gives_a_zero_step() -> None:
    assert not orthogonal(torch.zeros(4, 8, 16)).any()


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_one_matrix_in_any_memory_format(memory: torch.memory_format) -> None:
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(6, 4, 3, 3).to(memory_format=memory))
    gradient, before = torch.randn(6, 4, 3, 3), weights.detach().clone()
    weights.grad = gradient.clone()
    Muon([{"params": [weights]}], lr=0.1).step()
    expected = orthogonal(gradient.flatten(1)).view(6, 4, 3, 3)
    assert torch.allclose(before - weights.detach(), 0.1 * expected, atol=1e-5)


def test_transformations_are_orthogonalised_class_by_class() -> None:
    torch.manual_seed(0)
    for shape in ((5, 8, 30), (8, 30)):  # 3 classes of 10D; 5 inputs of 8D, or a transformation that all inputs share
        weights = torch.nn.Parameter(torch.randn(shape))
        gradient, before = torch.randn(shape), weights.detach().clone()
        weights.grad = gradient.clone()
        Muon([{"params": [weights], "columns": 10}], lr=0.1).step()
        moved = (before - weights.detach()) / 0.1
        assert torch.allclose(moved[..., 10:20], orthogonal(gradient[..., 10:20]), atol=1e-5)


def test_steps_use_nesterov_momentum() -> None:
    weights = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = Muon([{"params": [weights]}], lr=1.0)
    gradients = torch.eye(2), torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    average = torch.zeros(2, 2)
    for gradient in gradients:
        before, weights.grad = weights.detach().clone(), gradient
        optimizer.step()
        average = MOMENTUM * average + (1 - MOMENTUM) * gradient
        ahead = (1 - MOMENTUM) * gradient + MOMENTUM * average
        assert torch.allclose(before - weights.detach(), orthogonal(ahead), atol=1e-6)


def test_muon_excludes_the_first_and_depthwise_convolutions() -> None:
    compact, single = (Network(PRESETS[name].network) for name in ("compact", "compact16"))
    assert [tuple(kernel.shape[:2]) for kernel in convolutions(compact)] == [(32, 32), (64, 32), (64, 64), (128, 64), (128, 128)]
    assert len(transforms(compact)) == 1
    assert len(convolutions(single)) == 3  # three of the stem's four, and not the depthwise one
