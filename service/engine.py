"""A Capsule Network over two ONNX sessions: classify, reconstruct, perturb. Knows no HTTP and no pictures, only arrays.

Letters in shapes: n pictures, K classes, D pose values, M objects at most in a picture, C H W channels, height, width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service import bundle, cuda
from service.bundle import DECODER, ENCODER, Array, Bundle
from service.errors import StartError, Unprocessable
from service.manifest import BundleError, Manifest, Variant, read_manifest
from service.process import cpus
from service.runtime import CPU, Session
from service.sessions import Device
from service.settings import WantedVariant

Labels = NDArray[np.int64]
LARGEST_DRAWING_BATCH = cuda.BUCKETS[-1]  # drawings are cheap beside encodings, and a sweep wants a hundred


class Perception(NamedTuple):
    """All that was seen in n pictures; every field has n rows, so that a batch can be split into its requests."""

    lengths: Array  # (n, K): lengths of the capsules, which are the class probabilities
    capsules: Array  # (n, K, D)
    winners: Labels  # (n, M): classes of the longest capsules, longest first
    present: NDArray[np.bool_]  # (n, M): the first always; another if it is as long as a real object's usually is
    drawings: Array  # (n, M, C, H, W): each object as the network believes it saw it
    errors: Array  # (n,): mean squared difference between picture and drawings, per pixel; NaN if not drawn
    contrasts: Array  # (n,): standard deviation of the picture's pixels

    def objects(self, row: int) -> list[int]:
        """The classes seen in one picture, the longest capsule's first."""
        found: list[int] = self.winners[row][self.present[row]].tolist()
        return found


@dataclass(frozen=True)
class CapsNet:
    manifest: Manifest
    variant: Variant
    device: Device
    encoder: Session
    decoder: Session
    replay: float  # largest difference to the exporter's own outputs, seen while loading

    @property
    def nodes(self) -> dict[str, int]:
        """Number of nodes of both graphs, by the provider that runs them."""
        return dict(Counter(self.encoder.nodes) + Counter(self.decoder.nodes))

    def classify(self, images: Array) -> tuple[Array, Array]:
        """(n, C, H, W) -> lengths (n, K), capsules (n, K, D)."""
        lengths, capsules = self.encoder.run(images)
        return lengths, capsules

    def reconstruct(self, poses: Array, classes: Labels) -> Array:
        """Poses (n, D) of classes (n,) -> drawings (n, C, H, W)."""
        return self.decoder.run(poses, classes)[0]

    def perceive(self, images: Array, to_draw: NDArray[np.bool_]) -> Perception:
        """Classifies all n pictures, and draws what was seen in those that `to_draw` (n,) marks."""
        return self.perceive_encoded(images, *self.classify(images), to_draw)

    def perceive_encoded(self, images: Array, lengths: Array, capsules: Array, to_draw: NDArray[np.bool_]) -> Perception:
        """The Perception of pictures whose capsules are already computed."""
        winners = np.argsort(-lengths, axis=1, kind="stable")[:, : self.manifest.max_objects]
        present = np.take_along_axis(lengths, winners, axis=1) >= self.manifest.thresholds.presence
        present[:, 0] = True
        drawings = self._drawings(capsules, winners, present & to_draw[:, None])
        errors = np.square(images - drawings.sum(axis=1).clip(max=1.0)).mean(axis=(1, 2, 3))
        errors[~to_draw] = np.nan
        return Perception(lengths, capsules, winners, present, drawings, errors, images.std(axis=(1, 2, 3)))

    def _drawings(self, capsules: Array, winners: Labels, to_draw: NDArray[np.bool_]) -> Array:
        drawings = np.zeros((*winners.shape, *self.manifest.image_shape), np.float32)
        if to_draw.any():
            rows, _ = np.nonzero(to_draw)
            classes = winners[to_draw]
            drawings[to_draw] = self.reconstruct(capsules[rows, classes], classes)
        return drawings

    def warm_up(self, max_batch: int) -> None:
        """Runs what a first request would otherwise wait for."""
        for size in self.device.warm_up_sizes(max_batch):
            blank = np.zeros((size, *self.manifest.image_shape), np.float32)
            self.encoder.warm(blank)
            self.perceive(blank, np.ones(size, bool))
        for size in self.device.warm_up_sizes(LARGEST_DRAWING_BATCH):
            self.decoder.warm(np.zeros((size, self.manifest.pose_size), np.float32), np.zeros(size, np.int64))


def expect_numbers(model: str, kind: str, *arrays: Array) -> None:
    """Raises Unprocessable for the first of n pictures or poses with numbers that are not finite: JSON has no NaN.

    A network that divides by zero does so for single ones.
    """
    for values in arrays:
        if np.isfinite(values).all():  # almost always
            continue
        rows = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
        raise Unprocessable(f"model {model} gives no finite numbers for {kind} {rows[0]}: ask another, and retrain this one")


def perturb(pose: Array, dims: Sequence[int], deltas: Sequence[float]) -> Array:
    """The pose (D,), or each of many (n, D), moved by a delta along each dim; a dim named twice moves twice."""
    moved = pose.copy()
    for dim, delta in zip(dims, deltas, strict=True):
        moved[..., dim] += delta
    return moved


def load(source: Bundle, wanted: WantedVariant, device: Device) -> CapsNet:
    """Opens a bundle's graphs and replays its example; raises BundleError if anything is not as the manifest says."""
    variant = _variant(source, wanted, device)
    try:
        encoder = device.open(source.encoder(variant), ENCODER, source.manifest)
        decoder = device.open(source.decoder, DECODER, source.manifest)
        if read_manifest(source.folder) != source.manifest:
            raise BundleError(f"{source.folder}: another bundle took its place while it was opened; load it again")
        net = CapsNet(source.manifest, variant, device, encoder, decoder, replay=0.0)
        replay = bundle.check_replay(source, variant, net.classify, net.reconstruct)
        blank = np.zeros((1, *source.manifest.image_shape), np.float32)
        if not all(np.isfinite(each).all() for each in net.classify(blank)):  # a squash that divides by a length of 0, say
            raise BundleError(f"{source.folder}: expected finite numbers for a blank picture, found others")
        return replace(net, replay=replay)
    except (BundleError, StartError):
        raise
    except Exception as error:  # whatever the runtime raises while it runs a graph that it could open
        first = str(error).strip().partition("\n")[0]
        raise BundleError(f"{source.folder}: expected graphs that run on their own example, found: {first}") from error


def _variant(source: Bundle, wanted: WantedVariant, device: Device) -> Variant:
    """The variant to run: `auto` is int8 on CPUs where that is faster, otherwise fp32."""
    if wanted == "auto":
        return "int8" if "int8" in source.manifest.variants and device.provider == CPU and cpus.is_faster_in_int8() else "fp32"
    if wanted not in source.manifest.variants:
        has = ", ".join(source.manifest.variants)
        raise StartError(f"CAPSERVE_VARIANT={wanted}, but model {source.manifest.name} has only {has}; set it to auto")
    return wanted
