from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from training.networks import Encoding
from training.pairs import Batch
from training.statistics import FEW, usual_statistics

CLASSES = ("a", "b")


@dataclass
class StubModel:
    """A model that gives the test's answers: lengths (n, 2), poses (n, 2, 3), and pictures of one grey."""

    lengths: Tensor
    capsules: Tensor
    grey: float = 0.0

    def classify(self, images: Tensor) -> Encoding:
        return Encoding(self.lengths, self.capsules)

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
        return torch.full((len(poses), 1, 2, 2), self.grey)


def batch(labels: list[int], grey: float = 0.0) -> Batch:
    images = torch.full((len(labels), 1, 2, 2), grey)
    return Batch(images, torch.tensor(labels)[:, None], images[:, None])


def test_prototypes_are_the_mean_pose_of_each_class() -> None:
    capsules = torch.arange(24.0).reshape(4, 2, 3)
    found = usual_statistics(StubModel(torch.rand(4, 2), capsules), [batch([0, 1, 0, 1])], CLASSES)
    assert found.prototypes[0] == pytest.approx(((capsules[0, 0] + capsules[2, 0]) / 2).tolist())
    assert found.prototypes[1] == pytest.approx(((capsules[1, 1] + capsules[3, 1]) / 2).tolist())


def test_percentiles_are_of_the_winner_its_lead_and_the_drawing_error() -> None:
    lengths = torch.stack([torch.linspace(0.5, 1.0, 1001), torch.full((1001,), 0.1)], dim=1)
    labels = [0] * 1000 + [1]
    found = usual_statistics(StubModel(lengths, torch.zeros(1001, 2, 3), grey=0.5), [batch(labels, grey=0.2)], CLASSES)
    assert found.thresholds.presence == pytest.approx(0.5025, abs=1e-4)  # all but one in 200 are longer
    assert found.thresholds.lengths["50"] == pytest.approx(0.75, abs=1e-4)
    assert found.thresholds.margins["50"] == pytest.approx(0.65, abs=1e-4)
    assert found.thresholds.reconstruction_errors["a"]["99"] == pytest.approx(0.09, abs=1e-4)
    assert list(found.thresholds.lengths) == list(found.thresholds.margins) == ["0.1", "0.5", "1", "2", "5", "50"]
    assert list(found.thresholds.reconstruction_errors["a"]) == ["50", "90", "95", "98", "99", "99.5", "99.9"]


@pytest.mark.parametrize("seen", [10, 60, FEW - 1])
def test_percentiles_of_few_pictures_hold_for_unseen_pictures(seen: int) -> None:
    """The furthest of ten is no estimate for one in a thousand: as a threshold it would make verdicts refuse one in eleven."""
    generator = torch.Generator().manual_seed(seen)
    beyond: dict[str, list[float]] = {}
    for _ in range(200):
        winners = torch.rand(seen, generator=generator) ** 0.25  # x ** 4 of all are shorter than x
        lengths = torch.stack([winners, torch.zeros(seen)], dim=1)
        found = usual_statistics(StubModel(lengths, torch.zeros(seen, 2, 3)), [batch([0] * (seen - 1) + [1])], CLASSES)
        assert found.thresholds.presence >= float(winners.min())
        for percentile, length in found.thresholds.lengths.items():
            beyond.setdefault(percentile, []).append(100 * length**4)
    for percentile, shares in beyond.items():
        assert 1 / 10 < sum(shares) / len(shares) / float(percentile) < 3, percentile


def test_a_class_of_one_picture_has_its_error_at_every_percentile() -> None:
    found = usual_statistics(
        StubModel(torch.rand(9, 2), torch.zeros(9, 2, 3), grey=0.5), [batch([0] * 8 + [1], grey=0.2)], CLASSES
    )
    assert list(found.thresholds.reconstruction_errors["b"].values()) == pytest.approx([0.09] * 7)


def test_drawing_errors_are_those_of_the_predicted_class() -> None:
    class Greys(StubModel):
        def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
            return classes[:, None, None, None].expand(-1, 1, 2, 2).float()  # black for a, white for b

    lengths = torch.tensor([[0.9, 0.1], [0.9, 0.1]])  # an a, and a b that it takes for one
    found = usual_statistics(Greys(lengths, torch.zeros(2, 2, 3)), [batch([0, 1])], CLASSES)
    assert [found.thresholds.reconstruction_errors[name]["50"] for name in CLASSES] == [0.0, 0.0]


def test_histograms_are_shares_of_all_pictures() -> None:
    lengths = torch.tensor([[0.92, 0.0], [0.93, 0.0], [0.1, 0.47], [0.2, 0.48]])
    found = usual_statistics(StubModel(lengths, torch.zeros(4, 2, 3), grey=1.0), [batch([0, 0, 1, 1])], CLASSES)
    histogram = found.references.winner_length
    assert sum(histogram.shares) == pytest.approx(1.0)
    shares = dict(zip(histogram.edges[:-1], histogram.shares, strict=True))
    assert shares[0.9] == 0.5
    assert shares[0.45] == 0.5
    assert sum(found.references.reconstruction_error.shares) == pytest.approx(1.0)


def test_statistics_of_pairs_use_the_shorter_capsule_and_both_drawings() -> None:
    class Greys(StubModel):
        def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
            return (classes[:, None, None, None].expand(-1, 1, 2, 2) + 1) / 10

    lengths = torch.tensor([[0.9, 0.7, 0.3, 0.1], [0.1, 0.8, 0.6, 0.2], [0.3, 0.1, 0.9, 0.5], [0.4, 0.1, 0.0, 0.8]])
    labels = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    capsules, black = torch.arange(32.0).reshape(4, 4, 2), torch.zeros(4, 1, 2, 2)
    found = usual_statistics(Greys(lengths, capsules), [Batch(black, labels, black[:, None])], ("a", "b", "c", "d"))
    assert found.thresholds.lengths["50"] == pytest.approx(0.55)  # of 0.7, 0.6, 0.5, 0.4
    assert found.thresholds.margins["50"] == pytest.approx(0.35)  # of 0.4, 0.4, 0.2, 0.3
    errors = {name: each["50"] for name, each in found.thresholds.reconstruction_errors.items()}
    assert errors == pytest.approx({"a": 0.17, "b": 0.17, "c": 0.37, "d": 0.37})  # of 0.3, 0.5, 0.7 and 0.5, squared
    assert found.prototypes[1] == pytest.approx(((capsules[0, 1] + capsules[1, 1]) / 2).tolist())
    assert found.prototypes[3] == pytest.approx(((capsules[2, 3] + capsules[3, 3]) / 2).tolist())
