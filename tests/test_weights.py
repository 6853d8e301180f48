"""The shipped bundles on the test set, by ONNX Runtime: the errors that their manifests claim, and README with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import accuracy
from training.errors import DataError
from training.subjects import opened

ROUNDING = 2  # errors more or less: another processor may round a picture over the edge


@pytest.mark.parametrize("name", accuracy.SHIPPED)
def test_a_shipped_bundle_makes_the_errors_it_claims(name: str) -> None:
    folder = os.environ.get("CAPSERVE_DATA")
    if not folder:
        pytest.skip("needs the data it was trained on: set CAPSERVE_DATA to a folder with MNIST's four idx files")
    with opened(accuracy.MODELS / name) as subject:
        assert subject.bundle is not None
        try:
            data = subject.data(Path(folder), its_own=True)
        except DataError as error:
            pytest.skip(f"needs the data it was trained on: {error}")
        claimed = subject.bundle.manifest.metrics.test
        assert set(claimed) == set(subject.models)
        for variant, found in subject.evaluations(data):
            print(f"\n{name} ({variant}): {found.error:.2f} % of {found.count} test pictures")
            assert found.count == claimed[variant].error.count
            assert abs(found.errors - claimed[variant].error.errors) <= ROUNDING
