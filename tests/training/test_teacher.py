"""A bundle that teaches a network of drawn digits: what is learned from it, and that it stays the same one all the way."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service import bundle
from training import checkpoint, subjects
from training.config import PRESETS, Config
from training.data import DataSet
from training.devices import Place
from training.errors import CheckpointError, DivergedError, SettingError, StoppedError, TrainingError
from training.evaluate import Evaluation, TorchModel
from training.export import export, record_test
from training.learner import Learner
from training.losses import margin, taught
from training.networks import Network
from training.pairs import Batch, scaled
from training.teacher import Teacher
from training.train import train

TINY = Path(__file__).parents[1] / "bundles" / "tiny"
CPU = Place(torch.device("cpu"))


def config(**training: Any) -> Config:
    settings = {"dataset": "folder", "epochs": 2, "batch_size": 50, "validation": 60, "teacher": str(TINY), **training}
    return replace(PRESETS["tiny"], training=replace(PRESETS["tiny"].training, **settings))


@pytest.fixture(scope="module")
def teacher(data: DataSet) -> Teacher:
    return Teacher(config(), data)


@pytest.mark.parametrize("augment", ["none", "affine"])
def test_a_step_learns_the_labels_and_what_the_teacher_says_of_the_same_changed_pictures(
    augment: str, teacher: Teacher, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(epochs=1, batch_size=340, schedule="constant", precision="fp32", augment=augment)
    shown: list[Batch] = []
    step = Learner.step

    def seen(learner: Learner, batch: Batch, *rest: Any, **named: Any) -> Any:
        shown.append(batch)
        return step(learner, batch, *rest, **named)

    monkeypatch.setattr(Learner, "step", seen)
    done = train(settings, data, tmp_path, CPU)
    images, labels, _ = shown.pop()
    torch.manual_seed(settings.training.seed)
    encoding, drawings = Network(settings.network)(images, labels)
    drawn = 0.0005 * (drawings[:, 0] - images).square().sum() / 340
    loss = margin(encoding.lengths, labels) + taught(encoding.lengths, teacher.lengths(images)) + drawn
    assert done.history[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)


def test_who_is_taught_comes_nearer_to_the_teacher(teacher: Teacher, data: DataSet, tmp_path: Path) -> None:
    _, held_out = data.split(60)
    images = scaled(held_out.images)
    told = teacher.lengths(images)
    apart = {}
    for folder in ("", str(TINY)):
        network = train(
            config(epochs=5, teacher=folder, precision="fp32"), data, tmp_path / f"taught{bool(folder)}", CPU
        ).restored()
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


@pytest.fixture(scope="module")
def student(data: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one epoch, and beside it the folder of its teacher."""
    work = tmp_path_factory.mktemp("student")
    shutil.copytree(TINY, work / "teacher")
    train(config(epochs=1, teacher=str(work / "teacher")), data, work / "run", CPU)
    return work


def test_the_manifest_names_the_version_of_the_teacher(teacher: Teacher, student: Path, data: DataSet, tmp_path: Path) -> None:
    made = export(checkpoint.load(student / "run"), data, tmp_path / "student", quantised=False, say=print)
    assert made.manifest.training.teacher == teacher.manifest.version == bundle.read(TINY).manifest.version


def test_a_run_goes_on_with_the_same_teacher_wherever_it_lies_now(student: Path, data: DataSet, tmp_path: Path) -> None:
    shutil.copytree(student / "run", tmp_path / "run")
    done = train(config(epochs=1, cycles=2), data, tmp_path / "run", CPU, resume=True)
    assert len(done.history) == 2
    assert checkpoint.load(tmp_path / "run").config.training.teacher == str(TINY)


def test_a_run_does_not_go_on_with_another_teacher_or_with_none(student: Path, data: DataSet, tmp_path: Path) -> None:
    shutil.copytree(student / "run", tmp_path / "run")
    other = export(checkpoint.load(student / "run"), data, tmp_path / "other", quantised=False, say=print).manifest.version
    longer = config(epochs=1, cycles=2, teacher=str(tmp_path / "other"))
    known = f"name with --teacher where version {bundle.read(TINY).manifest.version} lies now"
    with pytest.raises(SettingError, match=f"the teacher .*other is version {other}; {known}.* or start anew in another --out"):
        train(longer, data, tmp_path / "run", CPU, resume=True)
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(SettingError, match=f"cannot be read .*; {known}"):
        train(longer, data, tmp_path / "run", CPU, resume=True)
    with pytest.raises(CheckpointError, match=r"training\.teacher: .*/teacher against ''\."):
        train(config(epochs=1, cycles=2, teacher=""), data, tmp_path / "run", CPU, resume=True)


def test_a_run_that_has_ended_asks_for_no_teacher(
    student: Path, data: DataSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(student / "run", tmp_path / "run")
    train(config(epochs=1, teacher=str(tmp_path / "nowhere")), data, tmp_path / "run", CPU, resume=True)
    assert "already at epoch 1 of 1" in capsys.readouterr().out


def test_seeds_of_other_versions_of_a_teacher_are_not_recorded_together(student: Path, data: DataSet, tmp_path: Path) -> None:
    state = checkpoint.load(student / "run")
    made = export(state, data, tmp_path / "student", quantised=False, say=print)
    state.config = replace(state.config, training=replace(state.config.training, seed=1))
    for name in ("same", "another"):
        (tmp_path / name).mkdir()
    checkpoint.save(state, tmp_path / "same")
    checkpoint.save(replace(state, teacher="f" * 16), tmp_path / "another")
    with subjects.opened(made.folder) as first, subjects.opened(tmp_path / "same") as second:
        assert subjects.seeds_of_one_bundle([first, second]) is first.bundle
    with subjects.opened(made.folder) as first, subjects.opened(tmp_path / "another") as second:
        with pytest.raises(TrainingError, match=f"version {made.manifest.training.teacher} of the teacher against ffff"):
            subjects.seeds_of_one_bundle([first, second])


def test_another_teacher_s_run_drops_the_figures_of_other_seeds(student: Path, data: DataSet, tmp_path: Path) -> None:
    state, told = checkpoint.load(student / "run"), []
    made = export(state, data, tmp_path / "student", quantised=False, say=print)
    some = Evaluation(100, 1, torch.zeros(10, 10), 0.0)
    record_test(made, {"fp32": some}, {1: some})
    assert export(state, data, tmp_path / "student", quantised=False, say=told.append).manifest.metrics.other_seeds
    state.teacher = "f" * 16
    assert not export(state, data, tmp_path / "student", quantised=False, say=told.append).manifest.metrics.other_seeds
    assert any("other seeds goes with the bundle that is replaced: another version of the teacher" in line for line in told)


def test_a_teacher_that_does_not_fit_is_refused_before_anything_is_written(data: DataSet, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"tiny is not for these .*\(1, 36, 36\), 2\).*\(1, 28, 28\), 1\); name another"):
        train(config(pairs="overlapping"), data, tmp_path / "run", CPU)
    with pytest.raises(
        SettingError, match="cannot be read .*nowhere.*; name another bundle with --teacher, or learn from labels"
    ):
        train(config(teacher=str(tmp_path / "nowhere")), data, tmp_path / "run", CPU)
    assert not list((tmp_path / "run").glob("*"))


def test_a_teacher_that_learned_what_is_held_out_is_refused(student: Path, data: DataSet, tmp_path: Path) -> None:
    made = export(checkpoint.load(student / "run"), data, tmp_path / "student", quantised=False, say=print)
    with pytest.raises(SettingError, match="all but the last 60 training pictures: expected --validation 60 or less, found 61"):
        Teacher(config(teacher=str(made.folder), validation=61), data)
    Teacher(config(teacher=str(made.folder), validation=60), data)
    with pytest.raises(SettingError, match="expected --validation 5000 or less, found 5001"):  # it does not say of which pictures
        Teacher(config(validation=5001), data)


def test_a_teacher_of_another_captrain_is_refused_only_where_what_it_held_out_matters(student: Path, data: DataSet) -> None:
    path = student / "teacher" / "manifest.json"
    before = path.read_text()
    manifest = json.loads(before)
    manifest["config"]["training"]["hurry"] = True
    path.write_text(json.dumps(manifest))
    with pytest.raises(SettingError, match="what the teacher .*teacher held out cannot be read: .*hurry"):
        Teacher(config(teacher=str(path.parent)), data)
    manifest["training"]["data"] = "f" * 64
    path.write_text(json.dumps(manifest))
    Teacher(config(teacher=str(path.parent)), data)
    path.write_text(before)


def test_a_taught_run_whose_weights_are_no_numbers_says_so(student: Path, data: DataSet, tmp_path: Path) -> None:
    state = checkpoint.load(student / "run")
    next(iter(state.optimizer["state"].values()))["exp_avg"].fill_(float("nan"))
    checkpoint.save(state, tmp_path)
    with pytest.raises(DivergedError, match="the loss is nan"):
        train(config(epochs=1, cycles=2), data, tmp_path, CPU, resume=True)
