import pytest
import torch

from training.capsules import Squash
from training.losses import contrast, cross_entropy, margin, reconstruction


def test_margin_is_equation_4() -> None:
    """Present and 0.2 too short: 0.04. Absent and 0.3 too long: half of 0.09. Inside the margins: nothing."""
    lengths = torch.tensor([[0.7, 0.05, 0.4]])
    assert float(margin(lengths, torch.tensor([[0]]))) == pytest.approx(0.2**2 + 0.5 * 0.3**2)


def test_margin_counts_every_object_present() -> None:
    lengths = torch.tensor([[0.95, 0.5, 0.0]])
    assert float(margin(lengths, torch.tensor([[0, 1]]))) == pytest.approx(0.4**2)


@pytest.mark.parametrize("squash", ["paper", "half"])
def test_contrast_adds_the_log_share_of_squared_lengths_before_squash(squash: str) -> None:
    before = torch.tensor([3.0, 2.0, 1.0, 1.0])
    lengths = Squash(squash)(before.unsqueeze(1)).squeeze(1).unsqueeze(0)
    both = torch.tensor([[0, 1]])
    shares = torch.tensor([9.0, 4.0]) / (9 + 4 + 1 + 1)
    assert float(contrast(lengths, both) - margin(lengths, both)) == pytest.approx(float(-shares.log().mean()), rel=1e-3)


def test_contrast_has_a_gradient_where_the_margin_loss_is_zero() -> None:
    lengths = torch.tensor([[0.95, 0.05]], requires_grad=True)
    assert float(margin(lengths.detach(), torch.tensor([[0]]))) == 0
    contrast(lengths, torch.tensor([[0]])).backward()
    assert lengths.grad is not None
    assert lengths.grad[0, 0] < 0 < lengths.grad[0, 1]


@pytest.mark.parametrize("length", [0.0, 1.0])
def test_contrast_has_finite_gradients_at_lengths_zero_and_one(length: float) -> None:
    lengths = torch.full((1, 10), length, requires_grad=True)
    contrast(lengths, torch.tensor([[3]])).backward()
    assert lengths.grad is not None
    assert lengths.grad.isfinite().all()


def test_cross_entropy_is_the_logarithm_of_the_right_probability() -> None:
    assert float(cross_entropy(torch.tensor([[0.25, 0.75]]), torch.tensor([[0]]))) == pytest.approx(1.3862944)
    assert cross_entropy(torch.tensor([[0.0, 1.0]]), torch.tensor([[0]])).isfinite()


def test_reconstruction_sums_pixels_and_objects_and_averages_pictures() -> None:
    drawings = torch.zeros(4, 2, 1, 3, 3)
    targets = torch.full((4, 2, 1, 3, 3), 0.5)
    assert float(reconstruction(drawings, targets)) == pytest.approx(2 * 9 * 0.25)


def test_contrast_has_a_steep_gradient_for_a_far_too_short_capsule() -> None:
    lengths, labels = torch.tensor([[0.005, 0.9]], requires_grad=True), torch.tensor([[0]])
    (contrast(lengths, labels) - margin(lengths, labels)).backward()
    assert lengths.grad is not None
    assert float(lengths.grad[0, 0]) == pytest.approx(-1 / 0.005, rel=0.01)
