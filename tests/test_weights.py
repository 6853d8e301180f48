"""The shipped bundles: made by the presets they name, and making the errors on the test set that their manifests claim."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import accuracy
from service import bundle, engine, sessions
from service.manifest import ENCODER_FILES, Variant
from training.config import PRESETS, Config
from training.data import load
from training.errors import DataError
from training.evaluate import Evaluation, evaluate, fixed_batches, in_parts
from training.export import measurement
from training.networks import Encoding
from training.sources import find

INT8_LOSES = 0.02  # points at most


@pytest.fixture(scope="module")
def mnist() -> Path:
    folder = os.environ.get("CAPSERVE_DATA")
    if not folder:
        pytest.skip("needs the data they were trained on: set CAPSERVE_DATA to a folder with MNIST's four idx files")
    try:
        return find("mnist", Path(folder))
    except DataError as error:
        pytest.skip(f"needs the data they were trained on: {error}")


@dataclass(frozen=True)
class Served:
    """What the service makes of pictures, as evaluate.Model: where a processor multiplies int8, not what training measured."""

    network: engine.CapsNet

    def classify(self, images: Tensor) -> Encoding:
        return in_parts(lambda some: Encoding(*map(torch.from_numpy, self.network.classify(some.numpy()))), images)

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
        return torch.from_numpy(self.network.reconstruct(poses.numpy(), classes.numpy()))


@pytest.mark.parametrize("variant", ENCODER_FILES)
@pytest.mark.parametrize("name", accuracy.SHIPPED)
def test_the_service_makes_the_errors_that_a_shipped_bundle_claims(name: str, variant: Variant, mnist: Path) -> None:
    """As the service computes it on this processor; `captrain evaluate` counted int8 as it is written."""
    made = bundle.read(accuracy.MODELS / name)
    config, claimed = Config.from_dict(made.manifest.config), made.manifest.metrics.test
    assert set(claimed) == set(made.manifest.variants) == set(ENCODER_FILES)
    data = load("mnist", mnist)
    data.expect(made.manifest.training.data)
    device = sessions.device("cpu", threads=1, cuda_memory=0, cuda_graphs=False, probe=made.encoder("fp32"))
    pictures = fixed_batches(data.test, config.training.pairs)
    found = evaluate(Served(engine.load(made, variant, device)), pictures, len(data.classes))
    print(f"\n{name} ({variant}): {found.error:.2f} % of {found.count} test pictures")
    assert found.count == claimed[variant].error.count
    # another processor may round some pictures over the edge
    assert found.errors == pytest.approx(claimed[variant].error.errors, rel=0.01, abs=2)
    assert found.reconstruction_error == pytest.approx(claimed[variant].reconstruction_error, rel=0.01)


@pytest.mark.parametrize("name", accuracy.SHIPPED)
def test_percentages_and_intervals_are_those_of_the_errors_counted(name: str) -> None:
    metrics = bundle.read(accuracy.MODELS / name).manifest.metrics
    claimed = [each.error for each in metrics.test.values()] + [each.test for each in metrics.other_seeds]
    for rate in claimed:
        assert measurement(Evaluation(rate.count, rate.errors, torch.zeros(1, 1), 0.0)).error == rate
    assert metrics.test["int8"].error.percent <= metrics.test["fp32"].error.percent + INT8_LOSES


@pytest.mark.parametrize("name", accuracy.SHIPPED)
def test_a_shipped_bundle_is_its_preset_s_and_was_trained_to_the_end(name: str) -> None:
    manifest = bundle.read(accuracy.MODELS / name).manifest
    config = Config.from_dict(manifest.config)
    assert config.differences(PRESETS[name]) == []
    assert manifest.training.epochs == config.training.all_epochs
