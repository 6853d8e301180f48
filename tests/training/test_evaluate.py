import pytest
import torch
from torch import Tensor

from training.data import DataSet
from training.evaluate import Evaluation, evaluate, fixed_batches, hits
from training.networks import Encoding


class LabelTable:
    """A model that looks labels up in a table: right except for the first `wrong` pictures."""

    def __init__(self, data: DataSet, wrong: int) -> None:
        self.labels = data.test.labels.clone()
        self.labels[:wrong] = (self.labels[:wrong] + 1) % 10
        self.seen = 0

    def classify(self, images: Tensor) -> Encoding:
        labels = self.labels[self.seen : self.seen + len(images)]
        self.seen += len(images)
        return Encoding(torch.eye(10)[labels], torch.zeros(len(images), 10, 4))

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
        return torch.zeros(len(poses), 1, 28, 28)


def test_errors_confusion_and_drawing_error_are_counted(data: DataSet) -> None:
    measured = evaluate(LabelTable(data, wrong=3), fixed_batches(data.test, "none", size=7), 10)
    assert (measured.count, measured.errors, measured.error) == (60, 3, 5.0)
    assert measured.confusion.sum() == 60
    assert measured.confusion.diagonal().sum() == 57
    assert [int(measured.confusion[label, label + 1]) for label in range(3)] == [1, 1, 1]
    blank = (data.test.images.float() / 255).square().mean()
    assert measured.reconstruction_error == pytest.approx(float(blank), rel=1e-4)


@pytest.mark.parametrize(
    ("errors", "count", "low", "high"), [(25, 10_000, 0.17, 0.37), (0, 100, 0.0, 3.70), (100, 100, 96.30, 100.0)]
)
def test_the_interval_is_wilsons(errors: int, count: int, low: float, high: float) -> None:
    """Figures from Wilson's formula as published; 25 of 10,000 is the paper's own error."""
    measured = Evaluation(count, errors, torch.zeros(10, 10), 0.0)
    assert measured.interval == pytest.approx((low, high), abs=0.006)


def test_a_pair_is_right_when_both_are_found_in_any_order() -> None:
    predicted = torch.tensor([[3, 7], [7, 3], [3, 8]])
    assert hits(predicted, torch.tensor([[7, 3]] * 3)).tolist() == [True, True, False]


def test_fixed_pairs_are_the_same_each_time(data: DataSet) -> None:
    first, again = (list(fixed_batches(data.test, "overlapping", size=20)) for _ in range(2))
    assert all(torch.equal(one.images, two.images) for one, two in zip(first, again, strict=True))
    assert sum(len(batch.images) for batch in first) == 60


def test_the_report_lists_which_classes_were_confused(data: DataSet) -> None:
    report = evaluate(LabelTable(data, wrong=1), fixed_batches(data.test, "none"), 10).report(data.classes)
    assert "error 1.67 % (1 of 60; 95 % interval 0.29 to 8.86)" in report
    assert "0:    1 of 6  1 x1" in report
