"""What is measured on pictures of two objects, with models whose answers are given here."""

import pytest
import torch
from torch import Tensor

from training.evaluate import draw, evaluate
from training.networks import Encoding
from training.pairs import Batch
from training.statistics import usual_statistics

CLASSES = ("a", "b", "c")


class Greys:
    """A model that returns the given lengths, and draws each class in a grey of its own."""

    def __init__(self, lengths: list[list[float]], greys: tuple[float, ...] = (0.25, 0.5, 1.0)) -> None:
        self.lengths, self.greys = torch.tensor(lengths), torch.tensor(greys)

    def classify(self, images: Tensor) -> Encoding:
        return Encoding(self.lengths, torch.arange(len(self.lengths) * 3.0).reshape(-1, 3, 1).expand(-1, 3, 2))

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
        return self.greys[classes][:, None, None, None].expand(-1, 1, 2, 2)


def batch(labels: list[list[int]], grey: float) -> Batch:
    images = torch.full((len(labels), 1, 2, 2), grey)
    return Batch(images, torch.tensor(labels), images[:, None].expand(-1, len(labels[0]), -1, -1, -1))


def test_statistics_of_pairs_cover_both_objects() -> None:
    model = Greys([[0.9, 0.7, 0.2], [0.9, 0.7, 0.2]])
    found = usual_statistics(model, [batch([[0, 1], [1, 2]], grey=0.75)], CLASSES)
    assert found.thresholds.presence == pytest.approx(0.7)  # the shorter of the two
    assert found.thresholds.lengths["50"] == pytest.approx(0.7)
    assert found.thresholds.margins["50"] == pytest.approx(0.5)  # ahead of the longest that is absent
    assert list(found.thresholds.lengths) == ["0.1", "0.5", "1", "2", "5", "50"]
    for name in CLASSES:  # of both labels, drawn by both
        assert found.thresholds.reconstruction_errors[name]["50"] == pytest.approx(0.0, abs=1e-6)
    assert found.prototypes == ((0.0, 0.0), (2.5, 2.5), (5.0, 5.0))


def test_the_error_histogram_reaches_beyond_the_largest_error() -> None:
    found = usual_statistics(Greys([[0.9, 0.7, 0.2]]), [batch([[0, 1]], 0.25), batch([[1, 2]], 0.35)], CLASSES)
    assert found.references.reconstruction_error.edges[-1] == pytest.approx(1.25 * 0.25)


def test_overlaid_drawings_are_clipped_to_white() -> None:
    model = Greys([[0.9, 0.7, 0.2]], greys=(0.75, 0.75, 0.0))
    drawing = draw(model, model.classify(torch.zeros(1, 1, 2, 2)).capsules, torch.tensor([[0, 1]]))
    assert float(drawing.max()) == 1.0


def test_the_drawing_error_is_that_of_the_predicted_class() -> None:
    """Not of the objects that are really there: that would flatter it."""
    found = evaluate(Greys([[0.9, 0.1, 0.2]]), [batch([[1]], 0.25)], 3)  # takes a b for an a, and draws that
    assert (found.errors, found.reconstruction_error) == (1, 0.0)


def test_pairs_have_an_empty_confusion_matrix() -> None:
    assert not evaluate(Greys([[0.9, 0.7, 0.2]]), [batch([[0, 1]], 0.25)], 3).confusion.any()
