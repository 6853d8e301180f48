"""Examples for /docs that really work: made by the default model from its own prototypes when the page is first requested."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from service import answer, images, pose, tensors
from service.bundle import IMAGES, LENGTHS, Array
from service.pose import Pose
from service.served import Served

DIM, DELTA = 3, 0.05


def add(document: dict[str, Any], served: Served) -> None:
    """Adds requests and their real answers to an OpenAPI document."""
    manifest, net = served.manifest, served.net
    *_, start, end = range(len(manifest.classes))  # 8 and 9 if the classes are digits
    prototypes = np.array(manifest.prototypes, np.float32)
    drawing = net.reconstruct(prototypes[start : start + 1], np.array([start]))
    png = images.png(drawing[0])
    picture = images.decoded(png, drawing[0].size, manifest, normalise=True)[None]
    perception = net.perceive(picture, np.array([True]))
    (verdict,) = served.judge.verdicts(perception)
    response = answer.prediction(manifest, perception, 0, verdict, drawings=True)
    encoded = base64.b64encode(png).decode()
    tokens = [pose.encode(Pose(label, prototypes[label]), manifest) for label in (start, end)]
    paths = document["paths"]
    for operation in (each for path in paths.values() for each in path.values()):
        _set_parameter_examples(operation, {"name": manifest.name, "version": manifest.version})  # parameters of paths
    _set_body_examples(paths["/predict"]["post"], {"image": encoded}, response)
    _set_body_examples(
        paths["/predict/batch"]["post"], {"images": [encoded]}, {"model": manifest.name, "predictions": [response]}
    )
    for path, names in (
        ("/v2/models/{name}/infer", {"model_name": manifest.name}),
        ("/v2/models/{name}/versions/{version}/infer", {"model_name": manifest.name, "model_version": manifest.version}),
    ):
        _set_body_examples(paths[path]["post"], *_inference_example(served, picture, names))
    moved = {"pose": tokens[0], "dim": [min(DIM, manifest.pose_size - 1)], "delta": [DELTA]}
    _set_parameter_examples(paths["/reconstruct"]["get"], moved)
    _set_parameter_examples(paths["/reconstruct/sweep"]["get"], {"pose": tokens[0]})
    _set_parameter_examples(paths["/reconstruct/morph"]["get"], {"from": tokens[0], "to": tokens[1]})


def _inference_example(served: Served, picture: Array, names: Mapping[str, str]) -> tuple[Any, Any]:
    """The same picture for the Open Inference Protocol: its pixels to two decimals, and of the outputs only the lengths."""
    pixels = picture.round(2)
    tensor = {"name": IMAGES.name, "shape": list(pixels.shape), "datatype": tensors.FLOAT}
    tensor["data"] = [round(pixel, 2) for pixel in pixels.ravel().tolist()]
    lengths, _ = served.net.classify(pixels)
    response, _ = tensors.write(names, {LENGTHS.name: lengths}, {LENGTHS.name: False})
    return {"inputs": [tensor], "outputs": [{"name": LENGTHS.name}]}, json.loads(response)


def _set_body_examples(operation: dict[str, Any], request: Any, response: Any) -> None:
    operation["requestBody"]["content"]["application/json"]["example"] = request
    operation["responses"]["200"]["content"]["application/json"]["example"] = response


def _set_parameter_examples(operation: dict[str, Any], values: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", []):
        if parameter["name"] in values:
            parameter["example"] = values[parameter["name"]]
