"""Pose dimensions with meaning: axes turned so that each does one thing, and a name for what it was seen to do.

A capsule's pose may be turned by any rotation without any answer changing: routing and squash know only lengths
and scalar products, and the decoder's first layer can be turned back. So the axes are free to be chosen, after
training and at no cost, along the directions in which drawings grow thicker, lean, widen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from service.manifest import REACH, STRONGEST, Dimension
from training.capsules import ClassCapsules
from training.evaluate import Model, TorchModel, poses_of
from training.morphology import MEASURES, TINY, measured
from training.networks import CapsuleEncoder, Decoder, Network
from training.pairs import Batch

NUDGES, NUDGE = 16, 0.1  # random turns of each pose, and their size in every dimension
STEADY = 0.6  # a dimension is named where its mean effect is this share of its root mean square: nearly always one way
CLEAR = 0.9  # and where no other measure moves by more than this share of it
NOTICEABLE = 1.5  # and where the whole reach changes a drawing by this many standard deviations of the measure
RIDGE = 1e-3
UNSEEN = 0.005  # deviation of a measure, in pixels or shares of them, that nobody sees: of shipped networks all are larger


@dataclass(frozen=True)
class Poses:
    """Capsules of objects that are there."""

    poses: Tensor  # (n, pose)
    labels: Tensor  # (n,)

    def of(self, label: int) -> Poses:
        """Those of one class; of a class that nobody has seen, all."""
        chosen = self.labels == label
        return Poses(self.poses[chosen], self.labels[chosen]) if chosen.any() else self


def poses_of_objects(model: Model, batches: Iterable[Batch]) -> Poses:
    found, labels = [], []
    for batch in batches:
        found.append(poses_of(model.classify(batch.images).capsules, batch.labels).flatten(0, 1))
        labels.append(batch.labels.flatten())
    return Poses(torch.cat(found), torch.cat(labels))


def dimensions(model: Model, found: Poses) -> tuple[Dimension, ...]:
    """What each dimension does, by turning it on its own through the whole reach and measuring the drawings.

    Nothing for a plain CNN, whose capsules have one value: the class score.
    """
    if found.poses.shape[1] == 1:
        return ()
    return tuple(_named(effect) for effect in effects(model, found))


def plainest(model: Model, found: Poses, named: Sequence[Dimension]) -> int:
    """Which of the poses shows the names best: where even the dimension that shows its own the least moves little else."""
    shares = torch.ones(len(found.poses))
    for dimension, effect in zip(named, effects(model, found), strict=True):
        if dimension.name:
            own = effect[:, list(MEASURES).index(dimension.name)] * math.copysign(1, dimension.strength)
            shares = torch.minimum(shares, own / (effect.norm(dim=1) + TINY))
    return int(shares.argmax())


def effects(model: Model, found: Poses) -> Iterator[Tensor]:
    """By each dimension, turned on its own through the whole reach: (n, measures), in standard deviations."""
    unit = _deviation(model, found)
    for step in torch.eye(found.poses.shape[1]) * REACH:
        upper, lower = (measured(model.reconstruct(found.poses + turn, found.labels)) for turn in (step, -step))
        yield (upper - lower) / unit


def aligned(network: Network, found: Poses) -> Network:
    """The same network with its pose axes turned: first one for each measure, then what else changes drawings, most first.

    A decoder that sees the class has axes of its own for each class, else all classes share one rotation.
    """
    turned = copy.deepcopy(network)
    encoder, decoder = turned.encoder, turned.decoder
    if not isinstance(encoder, CapsuleEncoder):
        return turned  # a plain CNN has no pose to turn
    if found.poses.shape[1] > math.prod(decoder.image_shape):
        return turned  # more values than pixels that they could change
    model, classes = TorchModel(network), len(decoder.labels)
    groups = [found.of(label) for label in range(classes)] if decoder.sees_class else [found]
    turns = rotations(model, groups, _deviation(model, found))
    _turn(encoder.routed, decoder, turns.expand(classes, -1, -1))
    return turned


def rotations(model: Model, groups: Sequence[Poses], unit: Tensor) -> Tensor:
    """An orthogonal matrix for each group of poses: (groups, new axes, old axes). Which axis is for which measure is the same for
    all, though a measure change little in one: a dimension has one name, and 1s, say, hardly lean."""
    slopes = [_slopes(model, group, unit) for group in groups]
    steepness = torch.stack([measures.norm(dim=0) for measures, _ in slopes]).mean(dim=0)
    strongest = steepness.argsort(descending=True, stable=True)[: groups[0].poses.shape[1]]
    chosen = strongest[2 * REACH * steepness[strongest] > NOTICEABLE].sort().values
    return torch.stack([_axes(measures[:, chosen].double(), pixels.double()) for measures, pixels in slopes]).float()


def _axes(measures: Tensor, pixels: Tensor) -> Tensor:
    """New ones of old ones: first one for each of the measures, (size, chosen), then what else changes (size, pixels)."""
    directions = measures / measures.norm(dim=0).clamp(min=TINY)
    left, _, right = torch.linalg.svd(directions, full_matrices=False)
    first = left @ right  # Loewdin's rule: the orthonormal axes nearest to all directions at once, none preferred
    rest = pixels - first @ (first.T @ pixels)
    others = torch.linalg.svd(rest, full_matrices=False).U[:, : len(pixels) - first.shape[1]]
    return torch.cat([first, others], dim=1).T


def _slopes(model: Model, found: Poses, unit: Tensor) -> tuple[Tensor, Tensor]:
    """By how much measures and pixels change along each axis, by least squares over random small turns of all poses."""
    generator = torch.Generator().manual_seed(0)
    rest = model.reconstruct(found.poses, found.labels)
    before, size = measured(rest), found.poses.shape[1]
    square = torch.eye(size) * RIDGE
    measures, pixels = torch.zeros(size, before.shape[1]), torch.zeros(size, rest[0].numel())
    for _ in range(NUDGES):
        turns = torch.randn(found.poses.shape, generator=generator) * NUDGE
        drawings = model.reconstruct(found.poses + turns, found.labels)
        square += turns.T @ turns
        measures += turns.T @ ((measured(drawings) - before) / unit)
        pixels += turns.T @ (drawings - rest).flatten(1)
    return torch.linalg.solve(square, measures), torch.linalg.solve(square, pixels)


def _deviation(model: Model, found: Poses) -> Tensor:
    """The standard deviation of each measure among drawings of the same class: the unit of strength, (measures,). Where there is
    none, as of one drawing of each class, nothing can be told in it."""
    values = measured(model.reconstruct(found.poses, found.labels))
    labels = found.labels.unique()
    variances = [values[found.labels == label].var(dim=0, correction=0) for label in labels]
    deviation = torch.stack(variances).mean(dim=0).sqrt()
    return deviation.where(deviation > UNSEEN, math.inf)


def _named(effect: Tensor) -> Dimension:  # (n, measures)
    """Of drawings that hardly differ a turn is thousands of deviations, which says nothing of the dimension."""
    effect = effect.where(effect.abs().amax(dim=0) <= STRONGEST, 0.0)
    mean, strength = effect.mean(dim=0), effect.square().mean(dim=0).sqrt()
    (first, second), (most, _) = (found.tolist() for found in mean.abs().topk(2))
    tells = first > max(STEADY * float(strength[most]), second / CLEAR, NOTICEABLE)
    return Dimension(name=list(MEASURES)[most] if tells else "", strength=round(float(mean[most]), 3))


@torch.no_grad()
def _turn(routed: ClassCapsules, decoder: Decoder, rotations: Tensor) -> None:  # (classes, new axes, old axes)
    classes, size, _ = rotations.shape
    votes = routed.transforms.unflatten(-1, (classes, size))  # (..., classes, old)
    routed.transforms.copy_((rotations @ votes.unsqueeze(-1)).squeeze(-1).flatten(-2))
    first = decoder.layers[0]
    assert isinstance(first, nn.Linear)
    blocks = rotations if decoder.sees_class else rotations[:1]
    weights = first.weight.unflatten(1, (len(blocks), size))  # (hidden, blocks, old)
    first.weight.copy_((blocks @ weights.unsqueeze(-1)).squeeze(-1).flatten(1))
