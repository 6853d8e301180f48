"""A bundle in the place of another: what is replaced, what stays, and what is kept of the one before."""

import json
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from service import bundle
from service.manifest import MANIFEST, BundleError
from training.checkpoint import Checkpoint
from training.config import Config
from training.data import DataSet
from training.errors import ExportError
from training.evaluate import Evaluation, evaluate, fixed_batches
from training.export import (
    _other_seeds,
    _swap,
    export,
    record_test,
)
from training.networks import Encoding
from training.runtime import OnnxModel


def test_exporting_again_replaces_a_bundle_and_nothing_else(finished: Checkpoint, data: DataSet, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "shapes"
    first = export(finished, data, folder, quantised=False, say=lambda _: None)
    (folder / f"{MANIFEST}.part").touch()  # left by an `evaluate --record` that was killed
    again = export(finished, data, folder, quantised=False, say=lambda _: None)
    assert first.manifest.fingerprint == again.manifest.fingerprint
    assert [path.name for path in folder.parent.iterdir()] == ["shapes"]
    assert sorted(contents(folder)) == sorted([*first.manifest.files, MANIFEST])
    other = tmp_path / "photos"
    other.mkdir()
    (other / "keep.txt").write_text("mine")
    with pytest.raises(ExportError, match="exists and is not a bundle; export replaces only bundles"):
        export(finished, data, other, quantised=False, say=lambda _: None)
    assert (other / "keep.txt").read_text() == "mine"
    (other / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(ExportError, match="photos holds keep.txt, and bundles do not; move it away"):
        export(finished, data, other, quantised=False, say=lambda _: None)
    assert (other / "keep.txt").read_text() == "mine"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("error", "told"), [(0.3, r"0\.\d+"), (float("nan"), "nan")], ids=["far", "nan"])
def test_a_graph_that_differs_from_torch_leaves_the_old_bundle(
    error: float,
    told: str,
    finished: Checkpoint,
    shapes: bundle.Bundle,
    data: DataSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one of many numbers is wrong, so not every difference is large, or NaN."""
    classify = OnnxModel.classify

    def astray(model: OnnxModel, images: Tensor) -> Encoding:
        found = classify(model, images)
        found.lengths[0, 0] += error
        return found

    folder = tmp_path / "shapes"
    shutil.copytree(shapes.folder, folder)
    before = contents(folder)
    monkeypatch.setattr(OnnxModel, "classify", astray)
    with pytest.raises(ExportError, match=f"torch and ONNX Runtime differ by {told}; expected at most 0.0001"):
        export(finished, data, folder, quantised=False, say=lambda _: None)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()], ids=["disk", "interrupt"])
def test_a_failed_replacement_restores_the_old_bundle(
    error: BaseException,
    finished: Checkpoint,
    shapes: bundle.Bundle,
    data: DataSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old bundle is moved aside, and moving the new one into place fails; all other renames are real."""
    folder, rename = tmp_path / "shapes", Path.rename
    shutil.copytree(shapes.folder, folder)
    before = contents(folder)

    def failing(path: Path, target: Path) -> Path:
        if target == folder and path.name == folder.name:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises((ExportError, KeyboardInterrupt), match="the disk is gone; what stood there is as it was|^$"):
        export(finished, data, folder, quantised=False, say=lambda _: None)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_an_interrupt_after_the_swap_keeps_the_new_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, folder, rename = tmp_path / "draft", tmp_path / "shapes", Path.rename
    for each, content in ((draft, "new"), (folder, "old")):
        each.mkdir()
        (each / MANIFEST).write_text(content)

    def interrupted(path: Path, target: Path) -> None:
        rename(path, target)
        if path == draft:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _swap(draft, folder, tmp_path / "aside")
    assert contents(folder) == {MANIFEST: b"new"}


def test_replacing_a_bundle_of_another_version_reports_what_is_lost(
    finished: Checkpoint, shapes: bundle.Bundle, data: DataSet, tmp_path: Path
) -> None:
    folder, said = tmp_path / "shapes", list[str]()
    shutil.copytree(shapes.folder, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["config"]["training"]["momentum"] = 0.9
    (folder / MANIFEST).write_text(json.dumps(manifest))
    made = export(finished, data, folder, quantised=False, say=said.append)
    assert Config.from_dict(made.manifest.config) == finished.config
    assert re.match(r"replacing the bundle in .*shapes \(.*, fp32 and int8, seed \d+, \d+ epochs\)$", said[0])
    assert said[1].startswith("what it knows of other seeds is lost with the replaced bundle: not a config of this version")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda run: {"config": replace(run.config, preset="paper")}, "tiny, and this run is of paper"),
        (lambda run: {"classes": ("one", "two")}, "the classes 0, 1, .*, and this run is of the classes one, two"),
    ],
    ids=["preset", "classes"],
)
def test_a_bundle_of_another_preset_or_classes_is_not_replaced(
    other: Callable[[Checkpoint], dict[str, Any]],
    told: str,
    finished: Checkpoint,
    shapes: bundle.Bundle,
    data: DataSet,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "shapes"
    shutil.copytree(shapes.folder, folder)
    before = contents(folder)
    with pytest.raises(ExportError, match=f"holds a bundle of {told}: remove it, or choose"):
        export(replace(finished, **other(finished)), data, folder, quantised=False, say=lambda _: None)
    assert contents(folder) == before


def with_other_seed(count: int, shapes: bundle.Bundle, folder: Path) -> Path:
    """A copy of the bundle with a record of another seed's errors, on `count` pictures."""
    shutil.copytree(shapes.folder, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    rate = {"errors": 3, "count": count, "percent": 300 / count, "low": 0.1, "high": 13.7}
    manifest["metrics"]["other_seeds"] = [{"seed": 7, "test": rate}]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_other_seeds_are_dropped_if_the_new_bundles_training_differs(
    finished: Checkpoint, shapes: bundle.Bundle, data: DataSet, tmp_path: Path
) -> None:
    longer = replace(finished.config, training=replace(finished.config.training, learning_rate=0.02))
    for number, (run, why) in enumerate(
        [
            (replace(finished, history=finished.history[:1]), "a run that has not ended"),
            (replace(finished, config=longer), "training.learning_rate: 0.01 against 0.02"),
        ]
    ):
        folder, said = with_other_seed(60, shapes, tmp_path / str(number) / "shapes"), list[str]()
        assert export(run, data, folder, quantised=False, say=said.append).manifest.metrics.other_seeds == ()
        assert f"what it knows of 1 other seeds is lost with the replaced bundle: {why}" in said


def test_lost_seeds_are_reported_only_if_there_are_any(finished: Checkpoint, shapes: bundle.Bundle, tmp_path: Path) -> None:
    others, said = replace(finished, digest="0" * 64), list[str]()
    assert _other_seeds(tmp_path / "none", others, said.append) == ()
    assert said == []
    assert _other_seeds(shapes.folder, others, said.append) == ()
    assert [line.partition(" in ")[0] for line in said] == ["replacing the bundle"]
    folder = with_other_seed(60, shapes, tmp_path / "shapes")
    assert _other_seeds(folder, others, said.append) == ()
    assert said[-1] == "what it knows of 1 other seeds is lost with the replaced bundle: other training pictures"
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["training"]["data"]  # as in older bundles
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert [each.seed for each in _other_seeds(folder, others, said.append)] == [7]


def test_recorded_seeds_are_sorted_and_newer_figures_replace_older(shapes: bundle.Bundle, tmp_path: Path) -> None:
    made = bundle.read(with_other_seed(60, shapes, tmp_path / "shapes"))
    few, many = (Evaluation(60, errors, torch.zeros(2, 2), 0.03) for errors in (1, 20))
    for others, expected in (({9: many, 3: many}, [(3, 20), (7, 3), (9, 20)]), ({9: few, 7: few}, [(3, 20), (7, 1), (9, 1)])):
        record_test(made, {"fp32": few}, others)
        made = bundle.read(made.folder)
        assert [(each.seed, each.test.errors) for each in made.manifest.metrics.other_seeds] == expected
    rate = made.manifest.metrics.test["fp32"].error
    assert (rate.low, rate.percent, rate.high) == pytest.approx((0.295, 1.667, 8.855), abs=1e-3)


@pytest.mark.parametrize(("count", "kept"), [(60, 1), (600, 0)])
def test_other_seeds_stay_only_if_measured_on_as_many_pictures(
    count: int, kept: int, finished: Checkpoint, shapes: bundle.Bundle, data: DataSet, tmp_path: Path
) -> None:
    made = bundle.read(with_other_seed(count, shapes, tmp_path / "shapes"))
    model = OnnxModel(made.encoder("fp32"), made.decoder)
    record_test(made, {"fp32": evaluate(model, fixed_batches(data.test, "none"), len(data.classes))}, {})
    assert len(bundle.read(made.folder).manifest.metrics.other_seeds) == kept


def test_a_full_disk_is_reported_and_leaves_the_old_bundle(
    shapes: bundle.Bundle, finished: Checkpoint, data: DataSet, tmp_path: Path
) -> None:
    """A real failing write: the process may write no file over 8 kB, less than a graph takes."""
    before = shutil.copytree(shapes.folder, tmp_path / "shapes")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_192, hard))
    try:
        with pytest.raises(ExportError, match=f"could not write {before}: File too large; what stood there is as it was"):
            export(finished, data, before, quantised=False, say=str)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bundle.read(before).manifest == shapes.manifest
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_the_example_of_large_pictures_is_cut_to_the_services_limit(
    finished: Checkpoint, shapes: bundle.Bundle, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shapes"
    monkeypatch.setattr(bundle, "EXAMPLE_LIMIT", 20_000)
    few = export(finished, data, folder, quantised=False, say=lambda _: None)
    assert len(few.example("fp32").images) == 2
    before = contents(folder)
    monkeypatch.setattr(bundle, "EXAMPLE_LIMIT", 2_000)
    with pytest.raises(BundleError, match="bytes unpacked, more than 2000"):
        export(finished, data, folder, quantised=False, say=lambda _: None)
    assert contents(folder) == before
