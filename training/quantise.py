"""The encoder in int8: static QDQ, per channel, calibrated on training digits.

Convolutions and fully connected layers only. Squash and routing weigh small differences between lengths and stay float.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from torch import Tensor

from service.bundle import IMAGES

QUANTISED = ("Conv", "Gemm", "Relu")  # a Relu is not computed at all: the range of the convolution before it starts at zero
BATCH = 50


class _Digits(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, images: Tensor) -> None:
        self.batches: Iterator[Tensor] = iter(images.split(BATCH))

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        batch = next(self.batches, None)
        return None if batch is None else {IMAGES.name: batch.numpy()}


def int8(encoder: onnx.ModelProto, calibration: Tensor) -> onnx.ModelProto:
    """The float32 encoder graph with its convolutions in int8; `calibration` (n, C, H, W) shows it usual activations."""
    logging.getLogger().addFilter(_quiet)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "encoder.onnx", Path(folder) / "encoder.int8.onnx"
            onnx.save(encoder, source)
            quantize_static(
                source,
                target,
                _Digits(calibration),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(QUANTISED),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
            )
            return onnx.load(target)
    finally:
        logging.getLogger().removeFilter(_quiet)


def _quiet(record: logging.LogRecord) -> bool:
    """ONNX Runtime advises preprocessing, which the exporter has done already."""
    return "pre-processing" not in record.getMessage()
