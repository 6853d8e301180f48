"""The paper's pictures as PNG files, from any Model: reconstructions right and wrong, the perturbation sheet, the curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from training.data import Digits
from training.evaluate import Model, draw, fixed_batches, hits, objects

DELTAS = torch.linspace(-0.25, 0.25, 11)  # Sabour et al. 2017, Figure 4: steps of 0.05
SHOWN = 10  # pictures a row


def figures(
    model: Model, pictures: Digits, pairs: str, classes: tuple[str, ...], history: Sequence[dict[str, float]], out: Path
) -> list[Path]:
    """Writes all figures that there is something to draw for, and says which."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = {
        "reconstructions.png": reconstructions(model, pictures, pairs, classes, right=True),
        "mistakes.png": reconstructions(model, pictures, pairs, classes, right=False),
        "perturbations.png": perturbations(model, pictures, pairs, classes),
        "curves.png": curves(history),
    }
    for name, figure in drawn.items():
        (out / name).unlink(missing_ok=True)
        if figure is not None:
            figure.savefig(out / name, dpi=120, bbox_inches="tight")
    return [out / name for name, figure in drawn.items() if figure is not None]


def reconstructions(model: Model, pictures: Digits, pairs: str, classes: tuple[str, ...], right: bool) -> Figure | None:
    """The first pictures named rightly (or wrongly) over what the network draws of what it believes: (label, prediction)."""
    inputs, labels, predictions, drawings = (torch.cat(part)[:SHOWN] for part in _picked(model, pictures, pairs, right))
    if not len(inputs):
        return None
    figure = Figure(figsize=(len(inputs), 2.4))
    cells = figure.subplots(2, len(inputs), squeeze=False)
    for column in range(len(inputs)):
        _picture(cells[0][column], inputs[column], _names(labels[column], classes))
        _picture(cells[1][column], drawings[column], _names(predictions[column], classes))
    _row_title(cells[0][0], "label, input")
    _row_title(cells[1][0], "prediction, drawing")
    return figure


def perturbations(model: Model, pictures: Digits, pairs: str, classes: tuple[str, ...]) -> Figure | None:
    """Figure 4: each row one pose dimension of one picture's capsule, moved in steps from -0.25 to 0.25."""
    encoding, label = _one(model, pictures, pairs)
    pose = encoding[label]  # (pose,)
    if len(pose) == 1:
        return None  # a plain CNN has no pose to turn
    poses = pose + torch.eye(len(pose))[:, None] * DELTAS[None, :, None]  # (dims, deltas, pose)
    drawings = model.reconstruct(poses.flatten(0, 1), torch.full((len(pose) * len(DELTAS),), label))
    figure = Figure(figsize=(len(DELTAS) * 0.7, 0.7 + len(pose) * 0.7))
    cells = figure.subplots(len(pose), len(DELTAS), squeeze=False)
    for index, drawing in enumerate(drawings):
        dim, column = divmod(index, len(DELTAS))
        _picture(cells[dim][column], drawing, f"{round(float(DELTAS[column]), 2) + 0.0:+.2f}" if dim == 0 else "")
    for dim in range(len(pose)):
        _row_title(cells[dim][0], f"dim {dim}")
    figure.suptitle(f"one {classes[label]}, each pose dimension moved", y=0.92, fontsize=10)
    return figure


def curves(history: Sequence[dict[str, float]]) -> Figure | None:
    if not history:
        return None
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    loss, error = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in history]
    loss.plot(epochs, [row["loss"] for row in history], label="training loss")
    error.plot(epochs, [row["training_error"] for row in history], label="training (augmented)")
    error.plot(epochs, [row["validation_error"] for row in history], label="validation")
    for axes, unit in ((loss, "loss"), (error, "error, %")):
        axes.set(xlabel="epoch", ylabel=unit, yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    return figure


def _picked(model: Model, pictures: Digits, pairs: str, right: bool) -> list[tuple[Tensor, ...]]:
    """Inputs, labels, predictions and drawings of the pictures that were named rightly, or wrongly."""
    parts = []
    for batch in fixed_batches(pictures, pairs):
        capsules = model.classify(batch.images)
        predicted = objects(capsules.lengths, batch.labels.shape[1])
        chosen = hits(predicted, batch.labels) == right
        drawings = draw(model, capsules.capsules, predicted)
        parts.append((batch.images[chosen], batch.labels[chosen], predicted[chosen], drawings[chosen]))
    return list(zip(*parts, strict=True))


def _one(model: Model, pictures: Digits, pairs: str) -> tuple[Tensor, int]:
    """The capsules of the first picture, (classes, pose), and which of them is its first label."""
    batch = next(iter(fixed_batches(pictures, pairs, size=1)))
    return model.classify(batch.images).capsules[0], int(batch.labels[0, 0])


def _picture(axes: Axes, image: Tensor, title: str) -> None:
    channels_last = image.permute(1, 2, 0).clamp(0, 1)
    axes.imshow(channels_last.numpy(), cmap="gray", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=8)


def _row_title(axes: Axes, text: str) -> None:
    axes.set_ylabel(text, fontsize=7, rotation=0, ha="right", va="center")


def _names(indices: Tensor, classes: tuple[str, ...]) -> str:
    return " ".join(classes[int(index)] for index in indices.sort().values)
