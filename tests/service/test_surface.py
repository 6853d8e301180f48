"""A surface fitted to light is found again from its own values, and from most of them."""

from __future__ import annotations

import numpy as np
import pytest

from service.pictures.surface import distance, drawn, fitted, terms

rng = np.random.default_rng(0)
Y, X = np.linspace(-1, 1, 30), np.linspace(-1, 1, 21)
GRID = terms(*map(np.ravel, np.meshgrid(Y, X, indexing="ij")))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_drawn_surface_is_the_sum_of_its_terms(channels: int) -> None:
    surface = rng.normal(size=(6, channels))
    np.testing.assert_allclose(drawn(surface, Y, X).reshape(-1, channels), GRID @ surface, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_surface_is_fitted_despite_ink_on_it(channels: int) -> None:
    surface = np.concatenate([np.full((1, channels), 0.8), rng.uniform(-0.05, 0.05, (5, channels))])
    colours = GRID @ surface
    colours[rng.random(len(colours)) < 0.2] = 0.1
    begun = np.zeros_like(surface)
    begun[0] = 0.8
    assert distance(GRID @ fitted(begun, GRID, colours), GRID @ surface).max() < 2e-3


def test_distance_is_the_euclidean_norm() -> None:
    one, other = rng.random((50, 3)), rng.random((50, 3))
    np.testing.assert_allclose(distance(one, other), np.linalg.norm(one - other, axis=1))
    np.testing.assert_allclose(distance(one, other[0]), np.linalg.norm(one - other[0], axis=1))
