import pytest
import torch

from training.losses import cross_entropy, margin, reconstruction


def test_margin_is_equation_4() -> None:
    """Present and 0.2 too short: 0.04. Absent and 0.3 too long: half of 0.09. Inside the margins: nothing."""
    lengths = torch.tensor([[0.7, 0.05, 0.4]])
    assert float(margin(lengths, torch.tensor([[0]]))) == pytest.approx(0.2**2 + 0.5 * 0.3**2)


def test_margin_counts_every_object_present() -> None:
    lengths = torch.tensor([[0.95, 0.5, 0.0]])
    assert float(margin(lengths, torch.tensor([[0, 1]]))) == pytest.approx(0.4**2)


def test_cross_entropy_is_the_logarithm_of_the_right_probability() -> None:
    assert float(cross_entropy(torch.tensor([[0.25, 0.75]]), torch.tensor([[0]]))) == pytest.approx(1.3862944)
    assert cross_entropy(torch.tensor([[0.0, 1.0]]), torch.tensor([[0]])).isfinite()


def test_reconstruction_sums_pixels_and_objects_and_averages_pictures() -> None:
    drawings = torch.zeros(4, 2, 1, 3, 3)
    targets = torch.full((4, 2, 1, 3, 3), 0.5)
    assert float(reconstruction(drawings, targets)) == pytest.approx(2 * 9 * 0.25)
