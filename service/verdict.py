"""Judges whether a picture shows a digit at all, by what is usual for digits: the manifest's percentiles. Knows no HTTP.

Length alone is easily fooled: noise makes longer capsules than digits do, but the decoder cannot draw it. So two things count:
how rarely a digit's winner is so short or leads by so little, and how rarely a digit of that class, or of the median class, is
drawn so badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, log10
from statistics import median
from typing import Literal

from service.bundle import Array
from service.engine import Perception
from service.manifest import Manifest

Verdict = Literal["digit", "unsure", "not_a_digit"]

BLANK = 0.05  # standard deviation of the pixels: digits have 0.15 and more, an even sheet of paper none

# The share of digits that may be judged unsure or worse, and not_a_digit. The bounds are sums of two rarities in powers of ten,
# assuming that both grow together. Chosen before looking at the test digits, and not to be adjusted to them.
UNSURE_SHARE, NOT_A_DIGIT_SHARE = 0.05, 0.02
UNSURE, NOT_A_DIGIT = -2 * log10(UNSURE_SHARE), -2 * log10(NOT_A_DIGIT_SHARE)

Tail = list[tuple[float, float]]  # (share of digits beyond a value, the value), from the median outwards, values rising


class Judge:
    """What is usual for the digits of one model."""

    def __init__(self, manifest: Manifest) -> None:
        thresholds = manifest.thresholds
        self._lengths, self._leads = _low_tail(thresholds.lengths), _low_tail(thresholds.margins)
        by_class = [thresholds.reconstruction_errors[name] for name in manifest.classes]
        # No class need be drawn better than the median class: MNIST's 1s are bare strokes, drawn so well that a 1 with a flag
        # or a foot would be the rarest of digits.
        middle = {each: median(errors[each] for errors in by_class) for each in by_class[0]}
        self._errors = [_high_tail({each: max(error, middle[each]) for each, error in errors.items()}) for errors in by_class]

    def verdicts(self, perception: Perception) -> list[Verdict]:
        rows = zip(perception.lengths, perception.errors.tolist(), perception.contrasts.tolist(), strict=True)
        return [self.judge(lengths, perception.objects(row), *measures) for row, (lengths, *measures) in enumerate(rows)]

    def judge(self, lengths: Array, objects: Sequence[int], reconstruction_error: float, contrast: float) -> Verdict:
        """Judges one picture by its `lengths` (K,) and the mean squared error of its drawing.

        `objects` are the classes seen in it, the longest first, and `contrast` is the standard deviation of its pixels.
        """
        if contrast < BLANK:
            return "not_a_digit"
        if not isfinite(reconstruction_error):  # nothing was drawn
            return "unsure"
        surprise = self.surprise(lengths, objects, reconstruction_error)
        return "digit" if surprise <= UNSURE else "unsure" if surprise <= NOT_A_DIGIT else "not_a_digit"

    def surprise(self, lengths: Array, objects: Sequence[int], reconstruction_error: float) -> float:
        """How unusual this would be for a digit, in powers of ten: 0.6 for what is better than the median in both respects."""
        ranked = [*sorted(lengths.tolist(), reverse=True), 0.0]
        shortest, next_longest = ranked[len(objects) - 1 : len(objects) + 1]
        hesitation = max(_rarity(-shortest, self._lengths), _rarity(next_longest - shortest, self._leads))
        return hesitation + min(_rarity(reconstruction_error, self._errors[label]) for label in objects)


def _low_tail(percentiles: dict[str, float]) -> Tail:
    """The tail where low values are suspicious; negated, so that suspicion grows with the value."""
    return sorted(((float(each) / 100, -value) for each, value in percentiles.items()), reverse=True)


def _high_tail(percentiles: dict[str, float]) -> Tail:
    return sorted(((1 - float(each) / 100, value) for each, value in percentiles.items()), reverse=True)


def _rarity(value: float, tail: Tail) -> float:
    """-log10 of the share of digits beyond the value; past the last percentile it grows on at the tail's mean rate."""
    (usual, start), (rare, end) = tail[0], tail[-1]
    if value <= start:
        return -log10(usual)
    for (share, near), (next_share, far) in pairwise(tail):
        if value <= far:
            return -log10(share) + log10(share / next_share) * (value - near) / (far - near)
    return -log10(rare) + log10(usual / rare) * (value - end) / max(end - start, 1e-6)
