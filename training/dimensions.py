"""Gives pose dimensions a meaning: rotates axes so that each does one thing, and names each after its measured effect.

Rotating a capsule's pose changes no answer: routing and squash use only lengths and scalar products, and the decoder's
first layer can be rotated back. So the axes can be chosen after training, at no cost, along the directions in which
drawings grow thicker, lean or widen.
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

NUDGES, NUDGE = 16, 0.1  # random changes of each pose, and their standard deviation in every dimension
STEADY = 0.6  # a dimension is named if its mean effect exceeds this share of the root mean square: nearly always one way
CLEAR = 0.9  # and if every other measure moves by less than this share of it
NOTICEABLE = 1.5  # and if the whole reach moves the measure by more than this many of its standard deviations
RIDGE = 1e-3
UNSEEN = 0.005  # standard deviation of a measure, in pixels or ratios, too small to see; shipped networks have larger ones


@dataclass(frozen=True)
class Poses:
    """Poses of objects that are present."""

    poses: Tensor  # (n, pose)
    labels: Tensor  # (n,)

    def of(self, label: int) -> Poses:
        """Return those of one class, or all if there is none of it."""
        chosen = self.labels == label
        return Poses(self.poses[chosen], self.labels[chosen]) if chosen.any() else self


def poses_of_objects(model: Model, batches: Iterable[Batch]) -> Poses:
    poses, labels = [], []
    for batch in batches:
        poses.append(poses_of(model.classify(batch.images).capsules, batch.labels).flatten(0, 1))
        labels.append(batch.labels.flatten())
    return Poses(torch.cat(poses), torch.cat(labels))


def dimensions(model: Model, sample: Poses) -> tuple[Dimension, ...]:
    """Find what each dimension does, by moving it alone through the whole reach and measuring the drawings.

    Empty for a plain CNN, whose capsules have one value: the class score.
    """
    if sample.poses.shape[1] == 1:
        return ()
    return tuple(_dimension(effect) for effect in effects(model, sample))


def clearest_pose(model: Model, sample: Poses, named: Sequence[Dimension]) -> int:
    """Index of the pose that shows the names best: even its least clear dimension moves little but its own measure."""
    shares = torch.ones(len(sample.poses))
    for dimension, effect in zip(named, effects(model, sample), strict=True):
        if dimension.name:
            own = effect[:, list(MEASURES).index(dimension.name)] * math.copysign(1, dimension.strength)
            shares = torch.minimum(shares, own / (effect.norm(dim=1) + TINY))
    return int(shares.argmax())


def effects(model: Model, sample: Poses) -> Iterator[Tensor]:
    """Yield each dimension's effect when moved alone through the whole reach: (n, measures), in standard deviations."""
    unit = _deviation(model, sample)
    for step in torch.eye(sample.poses.shape[1]) * REACH:
        upper, lower = (measured(model.reconstruct(sample.poses + turn, sample.labels)) for turn in (step, -step))
        yield (upper - lower) / unit


def aligned(network: Network, sample: Poses) -> Network:
    """The same network with rotated pose axes: first one for each measure, then the others, largest change of drawings first.

    If the decoder sees the class, each class has its own axes; otherwise all classes share one rotation.
    """
    turned = copy.deepcopy(network)
    encoder, decoder = turned.encoder, turned.decoder
    if not isinstance(encoder, CapsuleEncoder):
        return turned  # a plain CNN has no pose to rotate
    if sample.poses.shape[1] > math.prod(decoder.image_shape):
        return turned  # a pose has more values than there are pixels to change
    model, classes = TorchModel(network), len(decoder.labels)
    groups = [sample.of(label) for label in range(classes)] if decoder.sees_class else [sample]
    turns = rotations(model, groups, _deviation(model, sample))
    _rotate(encoder.routed, decoder, turns.expand(classes, -1, -1))
    return turned


def rotations(model: Model, groups: Sequence[Poses], unit: Tensor) -> Tensor:
    """An orthogonal matrix for each group of poses: (groups, new axes, old axes).

    An axis is for the same measure in all groups, even in one where it changes little (1s, say, hardly lean), because a
    dimension has one name.
    """
    slopes = [_slopes(model, group, unit) for group in groups]
    steepness = torch.stack([measures.norm(dim=0) for measures, _ in slopes]).mean(dim=0)
    strongest = steepness.argsort(descending=True, stable=True)[: groups[0].poses.shape[1]]
    chosen = strongest[2 * REACH * steepness[strongest] > NOTICEABLE].sort().values
    return torch.stack([_axes(measures[:, chosen].double(), pixels.double()) for measures, pixels in slopes]).float()


def _axes(measures: Tensor, pixels: Tensor) -> Tensor:
    """New axes from old: first one for each of the measures (size, chosen), then those that change pixels (size, pixels) most."""
    directions = measures / measures.norm(dim=0).clamp(min=TINY)
    left, _, right = torch.linalg.svd(directions, full_matrices=False)
    first = left @ right  # Loewdin's rule: the orthonormal axes nearest to all directions at once, none preferred
    rest = pixels - first @ (first.T @ pixels)
    others = torch.linalg.svd(rest, full_matrices=False).U[:, : len(pixels) - first.shape[1]]
    return torch.cat([first, others], dim=1).T


def _slopes(model: Model, sample: Poses, unit: Tensor) -> tuple[Tensor, Tensor]:
    """How much measures and pixels change along each axis: least squares over small random changes of all poses."""
    generator = torch.Generator().manual_seed(0)
    rest = model.reconstruct(sample.poses, sample.labels)
    before, size = measured(rest), sample.poses.shape[1]
    square = torch.eye(size) * RIDGE
    measures, pixels = torch.zeros(size, before.shape[1]), torch.zeros(size, rest[0].numel())
    for _ in range(NUDGES):
        turns = torch.randn(sample.poses.shape, generator=generator) * NUDGE
        drawings = model.reconstruct(sample.poses + turns, sample.labels)
        square += turns.T @ turns
        measures += turns.T @ ((measured(drawings) - before) / unit)
        pixels += turns.T @ (drawings - rest).flatten(1)
    return torch.linalg.solve(square, measures), torch.linalg.solve(square, pixels)


def _deviation(model: Model, sample: Poses) -> Tensor:
    """The standard deviation of each measure among drawings of the same class: the unit of strength, (measures,).

    Infinite where it is too small to see, as with one drawing of each class, so that effects in this unit are zero.
    """
    values = measured(model.reconstruct(sample.poses, sample.labels))
    labels = sample.labels.unique()
    variances = [values[sample.labels == label].var(dim=0, correction=0) for label in labels]
    deviation = torch.stack(variances).mean(dim=0).sqrt()
    return deviation.where(deviation > UNSEEN, math.inf)


def _dimension(effect: Tensor) -> Dimension:  # (n, measures)
    """Name a dimension by its effect; measures with effects above STRONGEST are ignored, since drawings hardly differ in them."""
    effect = effect.where(effect.abs().amax(dim=0) <= STRONGEST, 0.0)
    mean, strength = effect.mean(dim=0), effect.square().mean(dim=0).sqrt()
    (first, second), (most, _) = (largest.tolist() for largest in mean.abs().topk(2))
    nameable = first > max(STEADY * float(strength[most]), second / CLEAR, NOTICEABLE)
    return Dimension(name=list(MEASURES)[most] if nameable else "", strength=round(float(mean[most]), 3))


@torch.no_grad()
def _rotate(routed: ClassCapsules, decoder: Decoder, rotations: Tensor) -> None:  # (classes, new axes, old axes)
    classes, size, _ = rotations.shape
    votes = routed.transforms.unflatten(-1, (classes, size))  # (..., classes, old)
    routed.transforms.copy_((rotations @ votes.unsqueeze(-1)).squeeze(-1).flatten(-2))
    first = decoder.layers[0]
    assert isinstance(first, nn.Linear)
    blocks = rotations if decoder.sees_class else rotations[:1]
    weights = first.weight.unflatten(1, (len(blocks), size))  # (hidden, blocks, old)
    first.weight.copy_((blocks @ weights.unsqueeze(-1)).squeeze(-1).flatten(1))
