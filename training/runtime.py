"""Runs a bundle's graphs on ONNX Runtime, as an evaluate.Model: what the service will compute, on the training side."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from service.bundle import CAPSULES, CLASSES, DECODER, ENCODER, IMAGES, LENGTHS, POSES, RECONSTRUCTIONS, check_signature
from service.manifest import Manifest
from training.evaluate import encoded_in_parts
from training.networks import Encoding


class OnnxModel:
    def __init__(self, encoder: Path, decoder: Path) -> None:
        self.paths = {ENCODER: encoder, DECODER: decoder}
        self.encoder, self.decoder = _opened(encoder), _opened(decoder)

    def check(self, manifest: Manifest) -> None:
        for spec, session in ((ENCODER, self.encoder), (DECODER, self.decoder)):
            check_signature(spec, manifest, session.get_inputs(), session.get_outputs(), self.paths[spec])

    def classify(self, images: Tensor) -> Encoding:
        return encoded_in_parts(self._classify, images)

    def _classify(self, images: Tensor) -> Encoding:
        outputs = self.encoder.run([LENGTHS.name, CAPSULES.name], {IMAGES.name: images.numpy()})
        return Encoding(*(torch.from_numpy(output) for output in outputs))

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
        feed = {POSES.name: poses.numpy(), CLASSES.name: classes.numpy()}
        return torch.from_numpy(self.decoder.run([RECONSTRUCTIONS.name], feed)[0])


def _opened(graph: Path) -> onnxruntime.InferenceSession:
    """Run int8 as written, rounding to int8 and multiplying in float, so that results do not depend on this processor.

    On one without int8 dot products, sums of int8 products would saturate.
    """
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
