"""Turns one picture's row of a Perception into the JSON of /predict. Knows no HTTP."""

from __future__ import annotations

import base64
from typing import Any

from service import images, pose
from service.bundle import Array
from service.engine import Perception
from service.manifest import Manifest
from service.pose import Pose
from service.verdict import Verdict

DECIMALS = 6  # decimals of a probability: float32 has no more


def prediction(
    manifest: Manifest, perception: Perception, row: int, verdict: Verdict, drawings: bool, input_image: Array | None = None
) -> dict[str, Any]:
    """`drawings` adds each object's drawing to the answer; `input_image` (C, H, W), what the network was shown, too if given."""
    probabilities = [round(length, DECIMALS) for length in perception.lengths[row].tolist()]
    labels = perception.objects(row)
    objects: list[dict[str, Any]] = []
    for index, label in enumerate(labels):
        token = pose.encode(Pose(label, perception.capsules[row, label]), manifest)
        objects.append({"label": manifest.classes[label], "probability": probabilities[label], "pose": token})
        if drawings:
            objects[-1]["reconstruction"] = _data_uri(images.png(perception.drawings[row, index]))
    fields: dict[str, Any] = {
        "model": manifest.name,
        "label": manifest.classes[labels[0]],
        "probabilities": probabilities,
        "objects": objects,
        "reconstruction_error": round(float(perception.errors[row]), DECIMALS),
        "verdict": verdict,
    }
    if input_image is not None:
        fields["input"] = _data_uri(images.png(input_image))
    return fields


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
