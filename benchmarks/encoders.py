"""Measures the encoders alone in ONNX Runtime: images/s of PRESETS in float32 and int8, in turn in one run.

    python -m benchmarks.encoders

With one thread each is how the service runs them when there is enough to do, several side by side; all threads in one run is
what a lone request to a slow network gets. Options are ONNX Runtime's defaults, except for exact sums in int8: idle threads
spin here and sleep in the service. Speed does not depend on weights, so the networks are untrained. Ratios are relative to
`paper` in float32 at the same batch size, and those of int8 also to float32 of the same network.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks import rates
from benchmarks.untrained import bundle_of
from service import bundle, sessions
from service.bundle import ENCODER, IMAGES
from service.manifest import ENCODER_FILES, Variant
from service.process import cpus

Contender = tuple[str, Variant]

TEMPLATE = Path(__file__).parents[1] / "tests" / "bundles" / "tiny"
BASE: Contender = ("paper", "fp32")
PRESETS = ("paper", "compact", "compact16")
CONTENDERS: list[Contender] = [(preset, variant) for preset in PRESETS for variant in ENCODER_FILES]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundles = {preset: bundle_of(preset, Path(folder), bundle.read(TEMPLATE)) for preset in PRESETS}
        for threads in sorted({1, cpus.available()}):
            sessions = {each: session(bundles[each[0]].encoder(each[1]), threads) for each in CONTENDERS}
            for batch in (1, 16):
                compare(sessions, batch, f"batch {batch}, threads in the run: {threads}")


def compare(sessions: Mapping[Contender, onnxruntime.InferenceSession], batch: int, title: str) -> None:
    names = [tensor.name for tensor in ENCODER.outputs]
    images = np.random.default_rng(0).random((batch, 1, 28, 28), np.float32)
    results = rates.in_turn({each: partial(sessions[each].run, names, {IMAGES.name: images}) for each in CONTENDERS})
    print(title)
    for preset, variant in CONTENDERS:
        own = results[preset, variant]
        columns = f"{statistics.median(own) * batch:7.0f} images/s, {ratio(own, results[BASE]):5.2f}x"
        if variant != "fp32":
            columns += f", {ratio(own, results[preset, 'fp32']):5.2f}x of its own float32"
        print(f"  {preset:>10} {variant}: {columns}")


def ratio(own: list[float], base: list[float]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(mine / other for mine, other in zip(own, base, strict=True))


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    sessions.sum_exactly(options)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()
