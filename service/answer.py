"""What was seen -> what is said: one picture's row of a Perception as the JSON of /predict. Knows no HTTP."""

from __future__ import annotations

import base64
from typing import Any

from service import images, pose, verdict
from service.bundle import Manifest
from service.engine import Perception
from service.metrics import PredictionObserver
from service.pose import Pose

DIGITS = 6  # decimals of a probability: float32 has no more


def prediction(
    manifest: Manifest, seen: Perception, row: int, drawings: bool, observer: PredictionObserver | None = None
) -> dict[str, Any]:
    """`drawings` puts each object's picture into the answer."""
    lengths, error = seen.lengths[row], float(seen.errors[row])
    judged = verdict.judge(manifest, lengths, error, float(seen.contrasts[row]))
    objects = [index for index in range(manifest.max_objects) if seen.present[row, index]]
    winners = [int(seen.winners[row, index]) for index in objects]
    if observer is not None:
        observer.predicted(winners, float(lengths[winners[0]]), error, judged)
    probabilities = [round(length, DIGITS) for length in lengths.tolist()]
    found: list[dict[str, Any]] = []
    for index, winner in zip(objects, winners, strict=True):
        token = pose.encode(Pose(winner, seen.capsules[row, winner]), manifest)
        found.append({"label": manifest.classes[winner], "probability": probabilities[winner], "pose": token})
        if drawings:
            found[-1]["reconstruction"] = _data_uri(images.png(seen.drawings[row, index]))
    return {
        "model": manifest.name,
        "label": manifest.classes[winners[0]],
        "probabilities": probabilities,
        "objects": found,
        "reconstruction_error": round(error, DIGITS),
        "verdict": judged,
    }


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
