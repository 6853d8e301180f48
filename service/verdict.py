"""Does the picture show a digit at all? From what is usual for digits: the percentiles in the manifest. Knows no HTTP."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from service.bundle import Manifest

Verdict = Literal["digit", "unsure", "not_a_digit"]

BLANK = 0.05  # standard deviation of the pixels: digits have 0.15 and more, an even sheet of paper none


def judge(manifest: Manifest, lengths: NDArray[np.float32], reconstruction_error: float, contrast: float) -> Verdict:
    """`lengths` (K,) and the mean squared error of one picture; `contrast` is the standard deviation of its pixels."""
    thresholds = manifest.thresholds
    ranked = np.sort(lengths)[::-1]
    length, margin = float(ranked[0]), float(ranked[0] - ranked[1])
    usual = thresholds.reconstruction_errors[manifest.classes[int(lengths.argmax())]]
    if contrast < BLANK or length < thresholds.lengths["0.1"] or reconstruction_error > usual["99.9"]:
        return "not_a_digit"
    if length < thresholds.lengths["1"] or margin < thresholds.margins["1"] or reconstruction_error > usual["99"]:
        return "unsure"
    return "digit"
