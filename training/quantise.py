"""Quantises the encoder to int8: static QDQ, per channel, calibrated on training digits.

Only convolutions and fully connected layers are quantised. Squash and routing depend on small differences between lengths and
stay float. So does the layer that sees the picture: its few weights are slower in int8, and all later layers would pass its
rounding errors on. So may the layer whose output is squashed: in some networks its 256 levels make capsules too coarse.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from torch import Tensor

from service.bundle import IMAGES

QUANTISED = ("Conv", "Gemm", "Relu")  # a Relu costs nothing: the range of the convolution before it starts at zero instead
NEARLY_ALL = 0.9  # share of the weights of all layers
BATCH = 50
PERCENTILE = 99.999  # of absolute values: the int8 range ends there, since up to the very largest it would be too coarse


class _CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
    """Calibration pictures, read in ranges of one batch: each histogram is made from all activations of a range at once."""

    def __init__(self, images: Tensor) -> None:
        self.batches = images.split(BATCH)
        self.ahead: Iterator[Tensor] = iter(())

    def __len__(self) -> int:
        return len(self.batches)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.ahead = iter(self.batches[start_index:end_index])

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        batch = next(self.ahead, None)
        return None if batch is None else {IMAGES.name: batch.numpy()}


def int8(encoder: onnx.ModelProto, calibration: Tensor, capsules: bool) -> onnx.ModelProto:
    """Quantise a float32 encoder graph, with `capsules` also the layer that makes capsules.

    `calibration` (n, C, H, W) shows it usual activations.
    """
    logging.getLogger().addFilter(_quiet)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # it prints each of its steps
            source, target = Path(folder) / "encoder.onnx", Path(folder) / "encoder.int8.onnx"
            onnx.save(encoder, source)
            quantize_static(
                source,
                target,
                _CalibrationReader(calibration),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(QUANTISED),
                nodes_to_exclude=_kept_float(encoder, capsules),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.Percentile,
                extra_options={
                    "CalibPercentile": PERCENTILE,
                    "CalibTensorRangeSymmetric": True,  # uses absolute values; else as much is cut off below as above
                    "CalibStridedMinMax": 1,  # batches per range, for histograms too
                },
            )
            return onnx.load(target)
    finally:
        logging.getLogger().removeFilter(_quiet)


def may_keep_capsules_float(encoder: onnx.ModelProto) -> bool:
    """Whether the layer that makes capsules is small enough to stay float; otherwise `capsules` changes nothing in int8()."""
    return _kept_float(encoder, capsules=False) != _kept_float(encoder, capsules=True)


def _kept_float(encoder: onnx.ModelProto, capsules: bool) -> list[str]:
    """Layers that stay float: the one that sees the picture and, unless `capsules`, those whose output is capsules or scores.

    The latter have no ReLU after them. A layer that is nearly all the work, as the second of `paper`'s two, never stays float.
    """
    weights = {tensor.name: math.prod(tensor.dims) for tensor in encoder.graph.initializer}
    layers = [node for node in encoder.graph.node if node.op_type in ("Conv", "Gemm")]
    rectified = {node.input[0] for node in encoder.graph.node if node.op_type == "Relu"}
    total = sum(weights.get(node.input[1], 0) for node in layers)
    first = [node for node in layers if node.input[0] == IMAGES.name]
    last = [node for node in layers if node.output[0] not in rectified and not capsules]
    return [node.name for node in (*first, *last) if weights.get(node.input[1], 0) < NEARLY_ALL * total]


def _quiet(record: logging.LogRecord) -> bool:
    """Drop ONNX Runtime's advice to preprocess, which the exporter has done already."""
    return "pre-processing" not in record.getMessage()
