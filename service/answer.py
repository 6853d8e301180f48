"""What was seen -> what is said: one picture's row of a Perception as the JSON of /predict. Knows no HTTP."""

from __future__ import annotations

import base64
from math import isfinite
from typing import Any

from service import images, pose, verdict
from service.bundle import Array
from service.engine import Perception
from service.manifest import Manifest
from service.metrics import PredictionObserver
from service.pose import Pose
from service.verdict import Verdict

DIGITS = 6  # decimals of a probability: float32 has no more


def prediction(
    manifest: Manifest,
    perception: Perception,
    row: int,
    drawings: bool,
    observer: PredictionObserver | None = None,
    taken: Array | None = None,
) -> dict[str, Any]:
    """`drawings` puts each object's picture into the answer; `taken` (C, H, W) is the network's input, to be shown as well."""
    lengths, error, judged = perception.lengths[row], float(perception.errors[row]), _judged(manifest, perception, row)
    objects = [index for index in range(manifest.max_objects) if perception.present[row, index]]
    winners = [int(perception.winners[row, index]) for index in objects]
    if observer is not None:
        observer.predicted(winners, _winning(perception, row))
        observer.drawn(error, judged)
    probabilities = [round(length, DIGITS) for length in lengths.tolist()]
    found: list[dict[str, Any]] = []
    for index, winner in zip(objects, winners, strict=True):
        token = pose.encode(Pose(winner, perception.capsules[row, winner]), manifest)
        found.append({"label": manifest.classes[winner], "probability": probabilities[winner], "pose": token})
        if drawings:
            found[-1]["reconstruction"] = _data_uri(images.png(perception.drawings[row, index]))
    said: dict[str, Any] = {
        "model": manifest.name,
        "label": manifest.classes[winners[0]],
        "probabilities": probabilities,
        "objects": found,
        "reconstruction_error": round(error, DIGITS),
        "verdict": judged,
    }
    if taken is not None:
        said["input"] = _data_uri(images.png(taken))
    return said


def count(manifest: Manifest, perception: Perception, observer: PredictionObserver) -> None:
    """Tells of every picture what is known of it: those that nobody asked to draw have neither error nor verdict."""
    for row, (present, winners) in enumerate(zip(perception.present, perception.winners, strict=True)):
        observer.predicted(winners[present].tolist(), _winning(perception, row))
        if isfinite(perception.errors[row]):
            observer.drawn(float(perception.errors[row]), _judged(manifest, perception, row))


def _winning(perception: Perception, row: int) -> float:
    """The length of the capsule that wins: of several objects the last to, as in the manifest's references and the verdict."""
    return float(perception.lengths[row, perception.winners[row, -1]])


def _judged(manifest: Manifest, perception: Perception, row: int) -> Verdict:
    return verdict.judge(manifest, perception.lengths[row], float(perception.errors[row]), float(perception.contrasts[row]))


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
