"""The shipped bundles: made by the presets they name, and with the test errors that their manifests claim."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import accuracy
from service import bundle, engine, sessions
from service.bundle import Array
from service.manifest import ENCODER_FILES, Variant
from service.verdict import Judge, Verdict
from training import subjects
from training.config import PRESETS, Config
from training.data import load
from training.dimensions import effects, poses_of_objects
from training.evaluate import Evaluation, encoded_in_parts, evaluate, fixed_batches
from training.export import measured_dimensions, measurement
from training.morphology import MEASURES
from training.networks import Encoding
from training.statistics import usual_statistics

INT8_LOSES = 0.02  # percentage points at most
REFUSED = 0.02  # share of real pictures taken for no digit, at most
PAIRS = "5555dad9184b1d44c1734b42a45a94d310c69730bf5f80562f84ff6a6a9d3988"  # sha256 of the 10,000 that `overlap` is tested on


@dataclass(frozen=True)
class Served:
    """The service's answers, as an evaluate.Model: on processors that multiply int8, not what training measured."""

    network: engine.CapsNet
    verdicts: list[Verdict] = field(default_factory=list)  # on all that was classified

    def classify(self, images: Tensor) -> Encoding:
        return encoded_in_parts(lambda some: Encoding(*map(torch.from_numpy, self._judged(some.numpy()))), images)

    def _judged(self, images: Array) -> tuple[Array, Array]:
        lengths, capsules = self.network.classify(images)
        seen = self.network.perceive_encoded(images, lengths, capsules, np.ones(len(images), bool))
        self.verdicts.extend(Judge(self.network.manifest).verdicts(seen))
        return lengths, capsules

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
        return torch.from_numpy(self.network.reconstruct(poses.numpy(), classes.numpy()))


@pytest.mark.parametrize(("name", "variant"), [*((name, "int8") for name in accuracy.SHIPPED), ("compact", "fp32")])
def test_the_service_makes_the_errors_that_a_shipped_bundle_claims(name: str, variant: Variant, mnist_folder: Path) -> None:
    """As the service computes them on this processor, while `captrain evaluate` counted int8 as it is written.

    float32 is compared below for every bundle, on held-out digits; on all test digits `paper` and `overlap` would take a minute.
    """
    made = bundle.read(accuracy.MODELS / name)
    config, claimed = Config.from_dict(made.manifest.config), made.manifest.metrics.test
    assert set(claimed) == set(made.manifest.variants) == set(ENCODER_FILES)
    data = load("mnist", mnist_folder)
    data.expect(made.manifest.training.data)
    device = sessions.device("cpu", threads=1, cuda_memory=0, cuda_graphs=False, probe=made.encoder("fp32"))
    pictures = fixed_batches(data.test, config.training.pairs)
    served = Served(engine.load(made, variant, device))
    found = evaluate(served, pictures, len(data.classes))
    refused = served.verdicts.count("not_a_digit") / len(served.verdicts)
    print(f"\n{name} ({variant}): {found.error:.2f} % of {found.count} test pictures, {refused:.1%} taken for no digit")
    assert len(served.verdicts) == found.count
    assert refused <= REFUSED
    assert found.count == claimed[variant].error.count
    # on another processor, rounding may change a few answers
    assert found.errors == pytest.approx(claimed[variant].error.errors, rel=0.01, abs=2)
    assert found.reconstruction_error == pytest.approx(claimed[variant].reconstruction_error, rel=0.01)


def test_the_overlapping_test_pairs_have_not_changed(mnist_folder: Path) -> None:
    """Another version of torch might draw other partners and shifts from the same seed; errors would not be comparable."""
    content = hashlib.sha256()
    for batch in fixed_batches(load("mnist", mnist_folder).test, "overlapping"):
        content.update((batch.images * 255).round().to(torch.uint8).numpy().tobytes())
        content.update(batch.labels.numpy().tobytes())
    assert content.hexdigest() == PAIRS


@pytest.mark.parametrize("name", accuracy.SHIPPED)
def test_recorded_percentages_and_intervals_match_the_error_counts(name: str) -> None:
    metrics = bundle.read(accuracy.MODELS / name).manifest.metrics
    claimed = [each.error for each in metrics.test.values()] + [each.test for each in metrics.other_seeds]
    for rate in claimed:
        assert measurement(Evaluation(rate.count, rate.errors, torch.zeros(1, 1), 0.0)).error == rate
    assert metrics.test["int8"].error.percent <= metrics.test["fp32"].error.percent + INT8_LOSES


@pytest.mark.parametrize("name", accuracy.SHIPPED)
def test_a_shipped_bundle_has_its_presets_config_and_all_epochs(name: str) -> None:
    manifest = bundle.read(accuracy.MODELS / name).manifest
    config = Config.from_dict(manifest.config)
    assert [each for each in config.differences(PRESETS[name]) if not each.startswith("training.seed:")] == []
    assert manifest.training.epochs == config.training.all_epochs


@pytest.mark.parametrize("name", accuracy.SHIPPED)
def test_the_statistics_of_a_shipped_bundle_are_reproducible(name: str, mnist_folder: Path) -> None:
    """On the held-out digits: thresholds for verdicts, references for drift, prototypes."""
    with subjects.opened(accuracy.MODELS / name) as subject:
        settings = subject.config.training
        _, validation = subject.data(mnist_folder, its_own=True).split(settings.validation)
        found = usual_statistics(subject.models["fp32"], fixed_batches(validation, settings.pairs), subject.classes)
        assert subject.bundle is not None
        manifest = subject.bundle.manifest
    for claimed, measured in ((manifest.thresholds, found.thresholds), (manifest.references, found.references)):
        _alike(claimed.model_dump(), measured.model_dump())
    np.testing.assert_allclose(manifest.prototypes, found.prototypes, atol=1e-4)


def _alike(claimed: Any, measured: Any) -> None:
    if isinstance(claimed, dict):
        assert claimed.keys() == measured.keys()
        for key, value in claimed.items():
            _alike(value, measured[key])
    else:
        np.testing.assert_allclose(claimed, measured, rtol=1e-3, atol=5e-4)  # a picture or two at a bin's edge


def test_the_default_models_dimensions_do_what_its_manifest_says(mnist_folder: Path) -> None:
    with subjects.opened(accuracy.MODELS / "compact") as subject:
        settings = subject.config.training
        _, validation = subject.data(mnist_folder, its_own=True).split(settings.validation)
        found = measured_dimensions(subject.models["fp32"], validation, settings)
        assert subject.bundle is not None
        for claimed, measured in zip(subject.bundle.manifest.dimensions, found, strict=True):
            assert (claimed.name, claimed.strength) == (measured.name, pytest.approx(measured.strength, abs=0.05))


@pytest.mark.parametrize("name", accuracy.SHIPPED)
def test_a_dimension_does_what_it_is_named_for_in_every_class(name: str, mnist_folder: Path) -> None:
    """It might do so only on average, and in one class do what another dimension is named for."""
    with subjects.opened(accuracy.MODELS / name) as subject:
        settings = subject.config.training
        _, validation = subject.data(mnist_folder, its_own=True).split(settings.validation)
        found = poses_of_objects(subject.models["fp32"], fixed_batches(validation.sample(200), settings.pairs))
        assert subject.bundle is not None
        for dimension, effect in zip(subject.bundle.manifest.dimensions, effects(subject.models["fp32"], found), strict=True):
            if dimension.name:
                own = effect[:, list(MEASURES).index(dimension.name)] * np.sign(dimension.strength)
                means = [float(own[found.labels == label].mean()) for label in range(len(subject.classes))]
                assert min(means) > 0, (dimension.name, means)
