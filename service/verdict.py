"""Does the picture show a digit at all? From what is usual for digits: the percentiles in the manifest. Knows no HTTP.

Length alone is fooled: noise makes longer capsules than digits do, but the decoder cannot draw it. So two things count: how
rarely a digit's winner is so short or leads by so little, and how rarely a digit of that class is drawn so badly.
"""

from __future__ import annotations

from itertools import pairwise
from math import isfinite, log10
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from service.manifest import Manifest

Verdict = Literal["digit", "unsure", "not_a_digit"]

BLANK = 0.05  # standard deviation of the pixels: digits have 0.15 and more, an even sheet of paper none

# Two rarities are added as powers of ten, and they go together: so one digit in 20 is beyond the first, one in 50 the second.
# Chosen before the test digits were looked at, and not to be moved by what they say.
UNSURE, NOT_A_DIGIT = -2 * log10(0.05), -2 * log10(0.02)

Tail = list[tuple[float, float]]  # (share of digits that lie beyond, where), from the median outwards, growing


def judge(manifest: Manifest, lengths: NDArray[np.float32], reconstruction_error: float, contrast: float) -> Verdict:
    """`lengths` (K,) and the mean squared error of one picture; `contrast` is the standard deviation of its pixels."""
    if contrast < BLANK:
        return "not_a_digit"
    if not isfinite(reconstruction_error):  # nothing was drawn
        return "unsure"
    found = surprise(manifest, lengths, reconstruction_error)
    return "digit" if found <= UNSURE else "unsure" if found <= NOT_A_DIGIT else "not_a_digit"


def surprise(manifest: Manifest, lengths: NDArray[np.float32], reconstruction_error: float) -> float:
    """How unusual this would be for a digit, in powers of ten: 0.6 for what is better than the median in both respects."""
    thresholds = manifest.thresholds
    ranked = sorted(zip(lengths.tolist(), manifest.classes, strict=True), reverse=True)
    objects = min(max(1, sum(length >= thresholds.presence for length, _ in ranked)), manifest.max_objects)
    shortest = ranked[objects - 1][0]
    lead = shortest - (ranked[objects][0] if objects < len(ranked) else 0.0)
    hesitation = max(_rarity(-shortest, _low(thresholds.lengths)), _rarity(-lead, _low(thresholds.margins)))
    drawing = (_rarity(reconstruction_error, _high(thresholds.reconstruction_errors[name])) for _, name in ranked[:objects])
    return hesitation + min(drawing)


def _low(percentiles: dict[str, float]) -> Tail:
    """Where short is suspicious; turned round, so that suspicion grows with the value."""
    return sorted(((float(each) / 100, -value) for each, value in percentiles.items()), reverse=True)


def _high(percentiles: dict[str, float]) -> Tail:
    return sorted(((1 - float(each) / 100, value) for each, value in percentiles.items()), reverse=True)


def _rarity(value: float, tail: Tail) -> float:
    """Minus the power of ten of the share of digits beyond the value; past the last percentile it grows on as it did before."""
    (usual, start), (rare, end) = tail[0], tail[-1]
    if value <= start:
        return -log10(usual)
    for (share, near), (next_share, far) in pairwise(tail):
        if value <= far:
            return -log10(share) + log10(share / next_share) * (value - near) / (far - near)
    return -log10(rare) + log10(usual / rare) * (value - end) / max(end - start, 1e-6)
