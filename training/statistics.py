"""Measures what is usual for a model on validation pictures: thresholds, prototypes and drift references."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from service.manifest import References, Shares, Thresholds
from training.evaluate import Model, draw, objects, poses_of
from training.pairs import Batch

LOW = (0.1, 0.5, 1.0, 2.0, 5.0, 50.0)  # percentiles of lengths and leads, which are suspicious when short
HIGH = (50.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.9)  # and of drawing errors, which are suspicious when large
FEW = 400  # with fewer pictures, the outermost percentiles lie beyond all that were seen
PRESENCE = 0.5  # percentile of winning lengths: all but one in 200 real pictures have a capsule at least this long
BINS = 20


@dataclass(frozen=True)
class Statistics:
    thresholds: Thresholds
    references: References
    prototypes: tuple[tuple[float, ...], ...]


def usual_statistics(model: Model, batches: Iterable[Batch], classes: tuple[str, ...]) -> Statistics:
    winners, margins, errors, labels, poses = (
        torch.cat(part) for part in zip(*(_measured(model, batch) for batch in batches), strict=True)
    )
    by_class, prototypes = {}, []
    for index, name in enumerate(classes):
        of_class = (labels == index).any(dim=1)
        by_class[name] = _percentiles(errors[of_class], HIGH)
        prototypes.append(tuple(_rounded(poses[labels == index].mean(dim=0).tolist())))
    return Statistics(
        Thresholds(
            presence=float(torch.quantile(winners, PRESENCE / 100)),  # never extrapolated, lest it let in what is absent
            lengths=_percentiles(winners, LOW),
            margins=_percentiles(margins, LOW),
            reconstruction_errors=by_class,
        ),
        References(
            winner_length=_histogram(winners, 0.0, 1.0),
            reconstruction_error=_histogram(errors, 0.0, float(errors.max()) * 1.25),
        ),
        tuple(prototypes),
    )


def _measured(model: Model, batch: Batch) -> tuple[Tensor, ...]:
    """Per picture: shortest present capsule, its lead over the longest absent one, drawing error; labels, poses."""
    encoding, count = model.classify(batch.images), batch.labels.shape[1]
    ranked = encoding.lengths.sort(dim=1, descending=True).values
    drawing = draw(model, encoding.capsules, objects(encoding.lengths, count))  # of what it believes it saw, as the service draws
    errors = (drawing - batch.images).square().mean(dim=(1, 2, 3))
    shortest, lead = ranked[:, count - 1], ranked[:, count - 1] - ranked[:, count]
    return shortest, lead, errors, batch.labels, poses_of(encoding.capsules, batch.labels)


def _percentiles(values: Tensor, percentiles: tuple[float, ...]) -> dict[str, float]:
    return {f"{percentile:g}": _rounded([_quantile(values, percentile / 100)])[0] for percentile in percentiles}


def _quantile(values: Tensor, part: float) -> float:
    """The value below which this part of all pictures lies, an estimate if only few were seen.

    It then goes by the ranks that other pictures would take among those seen. Beyond the furthest, it assumes that the share of
    pictures still further off falls exponentially, at the rate at which it falls from the median to the furthest.
    """
    count = len(values)
    if count >= FEW:
        return float(torch.quantile(values, part))
    if part < 0.5:
        return max(0.0, -_quantile(-values, 1 - part))  # no length is below 0
    rank = part * (count + 1) - 1
    if rank <= count - 1 or count == 1:
        return float(torch.quantile(values, rank / max(1, count - 1)))
    median, furthest = float(values.quantile(0.5)), float(values.max())
    return median + (furthest - median) * math.log(0.5 / (1 - part)) / math.log(0.5 * (count + 1))


def _histogram(values: Tensor, low: float, high: float) -> Shares:
    counts, edges = torch.histogram(values, bins=BINS, range=(low, high))
    return Shares(edges=tuple(_rounded(edges.tolist())), shares=tuple(_rounded((counts / len(values)).tolist())))


def _rounded(values: list[float]) -> list[float]:
    """Six significant digits: more would only be noise in the manifest."""
    return [float(f"{value:.6g}") for value in values]
