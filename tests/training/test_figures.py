"""Figures of an untrained network: which are drawn, and of what size and colour."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from service.manifest import MANIFEST, Dimension
from training.config import PRESETS
from training.data import Digits
from training.errors import ExportError
from training.evaluate import TorchModel, fixed_batches
from training.figures import _picked, apart, curves, figures, perturbations, redrawn
from training.networks import Encoding, Network
from training.pairs import Batch

CLASSES = tuple("0123456789")
DIMENSIONS = [Dimension(name=name, strength=1.0) for name in ("slant", "", "height")]


def digits() -> Digits:
    generator = torch.Generator().manual_seed(0)
    return Digits(torch.randint(0, 256, (40, 1, 28, 28), generator=generator).byte(), torch.arange(40) % 10)


def model(side: int) -> TorchModel:
    torch.manual_seed(0)
    return TorchModel(Network(replace(PRESETS["tiny"].network, image_shape=(1, side, side), pose_size=len(DIMENSIONS))))


@pytest.mark.parametrize(
    ("pairs", "side", "expected"),
    [
        ("none", 28, {"reconstructions.png", "mistakes.png", "perturbations.png"}),
        ("overlapping", 36, {"mistakes.png", "apart.png", "perturbations.png"}),
    ],
)
def test_figures_draws_every_figure_that_applies(pairs: str, side: int, expected: set[str], tmp_path: Path) -> None:
    written = figures(model(side), fixed_batches(digits(), pairs), CLASSES, DIMENSIONS, [], tmp_path)
    assert expected <= {path.name for path in written} <= expected | {"reconstructions.png"}
    assert sorted(written) == sorted(tmp_path.iterdir())


def test_class_names_are_not_parsed_as_formulas(tmp_path: Path) -> None:
    names = tuple(f"$\\frac{{{name}" for name in CLASSES)
    written = figures(model(28), fixed_batches(digits(), "none"), names, DIMENSIONS, [], tmp_path)
    assert "mistakes.png" in {path.name for path in written}


def test_curves_of_a_single_epoch_without_errors_show_points() -> None:
    figure = curves([{"epoch": 1, "loss": 0.1, "training_error": 2.0, "validation_error": 0.0}])
    assert figure is not None
    lines = [line for axes in figure.axes for line in axes.lines]
    assert {line.get_marker() for line in lines} == {"."}
    figure.savefig(io.BytesIO())


def test_perturbation_rows_name_each_dimension_and_its_strength() -> None:
    (batch,) = fixed_batches(digits(), "none")
    figure = perturbations(model(28), batch, CLASSES, DIMENSIONS)
    assert figure is not None
    titles = [cells.get_ylabel() for cells in figure.axes if cells.get_ylabel()]
    assert titles == ["slant 0 (+1.0 SD)", "1", "height 2 (+1.0 SD)"]


def test_the_two_digits_of_a_pair_are_red_and_green(tmp_path: Path) -> None:
    figure = apart(model(36), next(fixed_batches(digits(), "overlapping")), CLASSES)
    assert figure is not None
    titles = [cells.get_title() for cells in figure.axes]
    assert all(len(title.split()) == 2 for title in titles[:20])  # two labels over each input, two predictions over each drawing
    figure.savefig(tmp_path / "apart.png")
    red, green, _ = np.asarray(Image.open(tmp_path / "apart.png").convert("RGB")).astype(int).transpose(2, 0, 1)
    assert (red - green > 100).any()
    assert (green - red > 100).any()


def test_redrawn_keeps_labels_and_only_drawings_classified_as_before() -> None:
    network = model(28)
    (batch,) = fixed_batches(digits(), "none")
    (again,) = redrawn(network, [batch])
    winners = network.classify(batch.images).lengths.argmax(dim=1)
    capsules = network.classify(batch.images).capsules[torch.arange(40), winners]
    drawings = network.reconstruct(capsules, winners)
    alike = network.classify(drawings).lengths.argmax(dim=1) == winners
    assert 0 < alike.sum() < 40  # else this network would be of no use here
    assert torch.allclose(again.images, drawings[alike], atol=1e-6)
    assert torch.equal(again.labels, batch.labels[alike])
    assert torch.equal(again.targets, batch.targets[alike])


def test_figures_raises_if_no_drawing_is_classified_as_its_picture(tmp_path: Path) -> None:
    """ONNX Runtime does not survive an empty batch."""
    network = model(28)
    encoding = network.classify(torch.zeros(1, 1, 28, 28))
    lengths = iter([encoding.lengths, encoding.lengths.flip(1)])  # the picture is classified one way, its drawing another
    network.classify = lambda images: encoding._replace(lengths=next(lengths))  # type: ignore[method-assign]
    (batch,) = fixed_batches(Digits(torch.zeros(1, 1, 28, 28, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)), "none")
    with pytest.raises(ExportError, match="nothing to draw"):
        figures(network, redrawn(network, [batch]), CLASSES, DIMENSIONS, [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failure_while_drawing_leaves_the_old_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reconstructions.png").write_bytes(b"of before")
    drawn: list[object] = []

    def savefig(figure: Figure, file: object, **options: object) -> None:
        drawn.append(figure)
        if len(drawn) == 3:
            raise MemoryError("the last of them")
        plain(figure, file, **options | {"dpi": 10})

    plain = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", savefig)
    with pytest.raises(MemoryError):
        figures(model(28), fixed_batches(digits(), "none"), CLASSES, [], [], tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"reconstructions.png": b"of before"}


def test_figures_refuses_to_write_into_a_bundle(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(ExportError, match="holds a bundle"):
        figures(model(28), fixed_batches(digits(), "none"), CLASSES, DIMENSIONS, [], tmp_path)


def test_right_and_wrong_pictures_are_picked_separately() -> None:
    class Says:
        def classify(self, images: Tensor) -> Encoding:
            return Encoding(torch.tensor([[0.9, 0.1, 0.2]] * 2), torch.zeros(2, 3, 2))

        def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
            return torch.zeros(len(poses), 1, 2, 2)

    images = torch.zeros(2, 1, 2, 2)
    batch = Batch(images, torch.tensor([[0], [1]]), images[:, None])
    assert [_picked(Says(), [batch], right)[1][0].tolist() for right in (True, False)] == [[[0]], [[1]]]
