"""A bundle that teaches a network of drawn digits: what is learned from it, and that it stays the same one all the way."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service import bundle
from service.manifest import BundleError
from training import checkpoint
from training.config import PRESETS, Config
from training.data import DataSet
from training.devices import Place
from training.errors import CheckpointError, SettingError, StoppedError
from training.evaluate import TorchModel
from training.export import export
from training.losses import margin, taught
from training.networks import Network
from training.pairs import scaled
from training.teacher import Teacher
from training.train import train

TINY = Path(__file__).parents[1] / "bundles" / "tiny"
CPU = Place(torch.device("cpu"))


def config(**training: Any) -> Config:
    settings = {"dataset": "folder", "epochs": 2, "batch_size": 50, "validation": 60, "teacher": str(TINY), **training}
    return replace(PRESETS["tiny"], training=replace(PRESETS["tiny"].training, **settings))


@pytest.fixture(scope="module")
def teacher(data: DataSet) -> Teacher:
    return Teacher(TINY, (1, 28, 28), 1, data.classes)


def test_a_step_learns_the_labels_and_what_the_teacher_says_of_the_same_pictures(
    teacher: Teacher, data: DataSet, tmp_path: Path
) -> None:
    settings = config(epochs=1, batch_size=340, schedule="constant", precision="fp32", augment="none")
    learn, _ = data.split(60)
    images, labels = scaled(learn.images), learn.labels.unsqueeze(1)
    torch.manual_seed(settings.training.seed)
    encoding, drawings = Network(settings.network)(images, labels)
    drawn = 0.0005 * (drawings[:, 0] - images).square().sum() / 340
    loss = margin(encoding.lengths, labels) + taught(encoding.lengths, teacher.lengths(images)) + drawn
    done = train(settings, data, tmp_path, CPU)
    assert done.history[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)


def test_who_is_taught_comes_nearer_to_the_teacher(teacher: Teacher, data: DataSet, tmp_path: Path) -> None:
    _, held_out = data.split(60)
    images = scaled(held_out.images)
    told = teacher.lengths(images)
    apart = {}
    for folder in ("", str(TINY)):
        network = train(config(epochs=5, teacher=folder), data, tmp_path / f"taught{bool(folder)}", CPU).restored()
        apart[folder] = float((TorchModel(network).classify(images).lengths - told).abs().mean())
    assert apart[str(TINY)] < 0.8 * apart[""]


def test_a_taught_run_resumes_to_the_same_numbers(data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(config(), data, tmp_path / "whole", CPU)
    answers = [False, True]
    with monkeypatch.context() as patch:
        patch.setattr(Place, "any", lambda self, flag: bool(answers and answers.pop(0)))
        with pytest.raises(StoppedError):
            train(config(), data, tmp_path / "parts", CPU)
    parts = train(config(), data, tmp_path / "parts", CPU, resume=True)
    assert all(torch.equal(whole.network[key], parts.network[key]) for key in whole.network)


def test_the_manifest_names_the_version_of_the_teacher_and_another_one_may_not_go_on(
    teacher: Teacher, data: DataSet, tmp_path: Path
) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(TINY, folder)
    done = train(config(epochs=1, teacher=str(folder)), data, tmp_path / "run", CPU)
    made = export(done, data, tmp_path / "student", quantised=False, say=print)
    assert made.manifest.training.teacher == teacher.version == bundle.read(TINY).manifest.version
    shutil.rmtree(folder)
    shutil.copytree(made.folder, folder)
    with pytest.raises(
        CheckpointError, match=f"learned from version {teacher.version} of .*teacher, found {made.manifest.version}"
    ):
        train(config(epochs=1, cycles=2, teacher=str(folder)), data, tmp_path / "run", CPU, resume=True)
    assert checkpoint.load(tmp_path / "run").teacher == teacher.version


def test_a_teacher_of_other_pictures_is_refused_before_anything_is_written(data: DataSet, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"the teacher .*tiny must answer for .*\(1, 36, 36\), 2\).*\(1, 28, 28\), 1\)"):
        train(config(pairs="overlapping"), data, tmp_path / "run", CPU)
    with pytest.raises(BundleError, match="nowhere"):
        train(config(teacher=str(tmp_path / "nowhere")), data, tmp_path / "run", CPU)
    assert not list((tmp_path / "run").glob("*"))
