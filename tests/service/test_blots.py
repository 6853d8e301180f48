"""Connected parts of a picture, compared with a search that looks at every pixel."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from service.pictures.blots import Blots, components


def flood_fill(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers the connected parts in the order of their first pixels."""
    numbers, count = np.zeros(mask.shape, np.int64), 0
    for start in zip(*np.nonzero(mask), strict=True):
        if numbers[start]:
            continue
        count += 1
        found = [start]
        while found:
            y, x = found.pop()
            if 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1] and mask[y, x] and not numbers[y, x]:
                numbers[y, x] = count
                found += [(y + down, x + across) for down in (-1, 0, 1) for across in (-1, 0, 1)]
    return numbers


@pytest.mark.parametrize("full", [0.0, 0.2, 0.4, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 3), (24, 17), (90, 30)])
def test_components_are_numbered_like_those_of_a_flood_fill(shape: tuple[int, int], full: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        mask = rng.random(shape) < full
        np.testing.assert_array_equal(components(mask), flood_fill(mask))


def test_a_spiral_is_one_part() -> None:
    mask = np.zeros((41, 41), bool)
    y = x = 20
    for turn in range(19):
        for _ in range(2 * (turn + 1)):
            mask[y, x] = True
            y, x = ((y, x + 1), (y + 1, x), (y, x - 1), (y - 1, x))[turn % 4]
    np.testing.assert_array_equal(components(mask), mask)


@pytest.mark.parametrize(("speck", "blots"), [(4, 1), (5, 2)])
def test_parts_far_shorter_than_the_longest_are_ignored_as_dirt(speck: int, blots: int) -> None:
    mask = np.zeros((10, 120), bool)
    mask[2, 10:110] = mask[6, 10 : 10 + speck] = True
    assert len(Blots.of(components(mask)).names) == blots
