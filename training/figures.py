"""Draws the paper's figures as PNG files, from any Model.

They are reconstructions of pictures classified correctly and not, separated pairs, the perturbation sheet, and curves.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from service.manifest import MANIFEST, REACH, Dimension
from training.checkpoint import write_atomically
from training.dimensions import clearest_pose, poses_of_objects
from training.errors import ExportError
from training.evaluate import Model, draw, drawings_of, hits, objects
from training.pairs import Batch

DELTAS = torch.linspace(-REACH, REACH, 11)  # Sabour et al. 2017, Figure 4: steps of 0.05
PICTURES_PER_ROW = 10
TITLE_WIDTH = 14  # letters per line of a title: as wide as a picture


def figures(
    model: Model,
    pictures: Iterable[Batch],
    classes: tuple[str, ...],
    dimensions: Sequence[Dimension],
    history: Sequence[dict[str, float]],
    out: Path,
) -> list[Path]:
    """Write all figures for which there is something to draw, and return their paths."""
    batches = list(pictures)
    if not batches:
        raise ExportError("there is nothing to draw: the network names no drawing as it named its picture; train it further")
    if (out / MANIFEST).exists():
        raise ExportError(f"{out} holds a bundle, which must hold nothing else; choose another --out")
    drawn = {
        "reconstructions.png": reconstructions(model, batches, classes, right=True),
        "mistakes.png": reconstructions(model, batches, classes, right=False),
        "apart.png": apart(model, batches[0], classes),
        "perturbations.png": perturbations(model, batches[0], classes, dimensions),
        "curves.png": curves(history),
    }
    contents = {name: _png(figure) for name, figure in drawn.items() if figure is not None}
    try:
        out.mkdir(parents=True, exist_ok=True)  # after all are drawn, so that a failure to draw leaves old files alone
    except OSError as error:
        raise ExportError(f"could not make the folder {out}: {error.strerror}; choose another --out") from error
    for name, content in contents.items():
        write_atomically(out / name, content)
    for name in drawn.keys() - contents.keys():
        (out / name).unlink(missing_ok=True)
    return [out / name for name in contents]


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, dpi=120, bbox_inches="tight")
    return content.getvalue()


def redrawn(model: Model, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Replace each picture by what the network draws for it, so that nothing of the data set is shown.

    If the network classifies its drawing differently from the picture, the drawing is no likeness, and both are left out.
    """
    for batch in batches:
        encoding = model.classify(batch.images)
        believed = objects(encoding.lengths, batch.labels.shape[1])
        drawings = draw(model, encoding.capsules, believed)
        alike = hits(objects(model.classify(drawings).lengths, batch.labels.shape[1]), believed)
        if alike.any():
            yield Batch(drawings[alike], batch.labels[alike], batch.targets[alike])


def reconstructions(model: Model, batches: Sequence[Batch], classes: tuple[str, ...], right: bool) -> Figure | None:
    """The first pictures classified correctly (or wrongly), above what the network draws for what it believes they are."""
    inputs, labels, predictions, drawings = (torch.cat(part)[:PICTURES_PER_ROW] for part in _picked(model, batches, right))
    if not len(inputs):
        return None
    figure = Figure(figsize=(1 + len(inputs), 2.6), layout="constrained")
    cells = figure.subplots(2, len(inputs), squeeze=False)
    for column in range(len(inputs)):
        _show_picture(cells[0][column], inputs[column], _class_names(labels[column], classes))
        _show_picture(cells[1][column], drawings[column], _class_names(predictions[column], classes))
    _set_row_title(cells[0][0], "label, input")
    _set_row_title(cells[1][0], "prediction, drawing")
    return figure


def apart(model: Model, batch: Batch, classes: tuple[str, ...]) -> Figure | None:
    """Figure 5: pairs above what their two longest capsules draw, one in red and one in green, first together, then apart."""
    if batch.labels.shape[1] == 1:
        return None
    images, labels = batch.images[:PICTURES_PER_ROW], batch.labels[:PICTURES_PER_ROW]
    encoding = model.classify(images)
    predicted = objects(encoding.lengths, 2)
    first, second = drawings_of(model, encoding.capsules, predicted).mean(2, True).unbind(1)
    nothing = torch.zeros_like(first)  # (batch, 1, H, W)
    rows = {
        "label, input": images,
        "prediction, drawing": torch.cat([first, second, nothing], dim=1),
        "one": torch.cat([first, nothing, nothing], dim=1),
        "the other": torch.cat([nothing, second, nothing], dim=1),
    }
    figure = Figure(figsize=(1 + len(images), 1.2 * len(rows)), layout="constrained")
    cells = figure.subplots(len(rows), len(images), squeeze=False)
    titles = {"label, input": labels, "prediction, drawing": predicted}
    for line, (title, shown) in zip(cells, rows.items(), strict=True):
        _set_row_title(line[0], title)
        for column, image in enumerate(shown):
            _show_picture(line[column], image, _class_names(titles[title][column], classes) if title in titles else "")
    return figure


def perturbations(model: Model, batch: Batch, classes: tuple[str, ...], dimensions: Sequence[Dimension]) -> Figure | None:
    """Figure 4: each row moves one pose dimension, in the paper's steps, of the object that shows the names best."""
    sample = poses_of_objects(model, [batch])
    if sample.poses.shape[1] == 1:
        return None  # a plain CNN has no pose to move
    chosen = clearest_pose(model, sample, dimensions) if dimensions else 0
    pose, label = sample.poses[chosen], int(sample.labels[chosen])
    poses = pose + torch.eye(len(pose))[:, None] * DELTAS[None, :, None]  # (dims, deltas, pose)
    drawings = model.reconstruct(poses.flatten(0, 1), torch.full((len(pose) * len(DELTAS),), label))
    height = 0.7 + len(pose) * 0.7
    figure = Figure(figsize=(len(DELTAS) * 0.7, height))
    cells = figure.subplots(len(pose), len(DELTAS), squeeze=False)
    for index, drawing in enumerate(drawings):
        dim, column = divmod(index, len(DELTAS))
        _show_picture(cells[dim][column], drawing, f"{round(float(DELTAS[column]), 2) + 0.0:+.2f}" if dim == 0 else "")
    for dim in range(len(pose)):
        _set_row_title(cells[dim][0], dimensions[dim].title(dim) if dimensions else str(dim))
    above = figure.subplotpars.top + 0.48 / height  # leaves a line for the deltas
    figure.suptitle(f"one {classes[label]}, each pose dimension moved", y=above, fontsize=10, parse_math=False)
    return figure


def curves(history: Sequence[dict[str, float]]) -> Figure | None:
    if not history:
        return None
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    loss, error = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in history]
    for axes, key, label in (
        (loss, "loss", "training loss"),
        (error, "training_error", "training (augmented)"),
        (error, "validation_error", "validation"),
    ):
        axes.plot(epochs, [row[key] or math.nan for row in history], label=label, marker=".")  # 0 % has no logarithm
    for axes, unit in ((loss, "loss"), (error, "error, %")):
        axes.set(xlabel="epoch", ylabel=unit, yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    return figure


def _picked(model: Model, batches: Sequence[Batch], right: bool) -> list[tuple[Tensor, ...]]:
    """Inputs, labels, predictions and drawings of the pictures that were classified correctly, or wrongly."""
    parts = []
    for batch in batches:
        encoding = model.classify(batch.images)
        predicted = objects(encoding.lengths, batch.labels.shape[1])
        chosen = hits(predicted, batch.labels) == right
        drawings = draw(model, encoding.capsules, predicted)
        parts.append((batch.images[chosen], batch.labels[chosen], predicted[chosen], drawings[chosen]))
    return list(zip(*parts, strict=True))


def _show_picture(axes: Axes, image: Tensor, title: str) -> None:
    channels_last = image.permute(1, 2, 0).clamp(0, 1)
    axes.imshow(channels_last.numpy(), cmap="gray", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(textwrap.fill(title, TITLE_WIDTH), fontsize=8, parse_math=False)


def _set_row_title(axes: Axes, text: str) -> None:
    axes.set_ylabel(text, fontsize=7, rotation=0, ha="right", va="center", parse_math=False)


def _class_names(indices: Tensor, classes: tuple[str, ...]) -> str:
    return " ".join(classes[int(index)] for index in indices.sort().values)
