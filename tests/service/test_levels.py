"""What is read from pixels that are sorted once, compared with NumPy, which goes through them for each value."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from service.pictures.levels import BINS, Departure, otsu, quantile

rng = np.random.default_rng(0)
VALUES: dict[str, NDArray[np.float32]] = {
    "noise": rng.normal(0, 0.02, (40, 31)).astype(np.float32),
    "ink on paper": np.where(rng.random((40, 31)) < 0.1, 0.9, 0.05).astype(np.float32),
    "blurred ink": np.clip(rng.normal(0.2, 0.3, (24, 24)), 0, 1).astype(np.float32),
    "few": np.array([[0.1, 0.7, 0.3]], np.float32),
    "one": np.array([[0.4]], np.float32),
    "all the same": np.full((9, 5), 0.3, np.float32),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("part", [0, 0.01, 0.25, 0.5, 0.998, 1])
def test_quantiles(values: NDArray[np.float32], part: float) -> None:
    assert quantile(np.sort(values, axis=None), part) == pytest.approx(np.quantile(values.astype(float), part), abs=1e-6)


@pytest.mark.parametrize("name", ["noise", "ink on paper", "blurred ink", "few"])
def test_the_threshold_separates_two_groups_almost_optimally(name: str) -> None:
    values = VALUES[name].ravel().astype(np.float64)

    def between(threshold: float) -> float:
        dark, light = values[values < threshold], values[values >= threshold]
        return dark.size * light.size * float(dark.mean() - light.mean()) ** 2 if dark.size and light.size else 0.0

    best = max(map(between, np.linspace(values.min(), values.max(), BINS + 1)))
    assert between(otsu(np.sort(VALUES[name], axis=None))) >= 0.99 * best  # otsu takes the groups' means from a histogram


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_strength_and_grain(values: NDArray[np.float32]) -> None:
    found, steps = Departure(values), [np.abs(np.diff(values, axis=axis)).ravel() for axis in (0, 1)]
    assert found.strength == (np.sort(values.ravel())[-4] if values.size > 4 else values.max())
    assert found.grain == pytest.approx(1.05 * np.median(np.concatenate(steps)) if values.size > 1 else 0, abs=1e-5)


def test_noise_is_not_writing_and_ink_is() -> None:
    assert {name: Departure(values).written for name, values in VALUES.items() if values.size > 100} == {
        "noise": False,
        "ink on paper": True,
        "blurred ink": False,  # it departs no more than neighbours differ anyway
    }


def test_a_stain_much_paler_than_the_ink_is_treated_as_paper() -> None:
    """A stain on a clean sheet is so much larger than the ink that the threshold parts the sheet from the stain."""
    line = np.zeros((100, 100), np.float32)
    line[:30] = 0.1
    line[50, 40:60] = 1
    found = Departure(line)
    assert found.threshold < 0.1
    np.testing.assert_array_equal(line > found.safe_threshold, line == 1)
