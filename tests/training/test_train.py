"""Real training on drawn digits with the tiny preset: what a run leaves, and that it resumes with the same results."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.manifest import MANIFEST
from tests.sharing import made_once
from training import checkpoint
from training.__main__ import main
from training.config import PRESETS, Config
from training.data import DataSet
from training.devices import Place
from training.errors import CheckpointError, DataError, DivergedError, SettingError, StoppedError, UnknownNameError
from training.evaluate import Evaluation, TorchModel, evaluate, fixed_batches
from training.export import export
from training.losses import margin
from training.networks import Network
from training.schedules import SCHEDULES
from training.train import train

ROOT = Path(__file__).parents[2]
CPU = Place(torch.device("cpu"))
CAPTRAIN = [sys.executable, "-m", "training"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1"),
    *("-m", "training"),
]


def config(name: str = "tiny", **training: Any) -> Config:
    settings = {"dataset": "folder", "epochs": 2, "batch_size": 50, "validation": 60, **training}
    return replace(PRESETS[name], training=replace(PRESETS[name].training, **settings))


def same(first: Path, second: Path, rounding: float = 0.0) -> bool:
    """Whether weights, averages and optimizers are equal bit for bit, and histories but for rounding; only times may differ."""
    one, two = checkpoint.load(first), checkpoint.load(second)
    rows = [[{**row, "seconds": 0} for row in state.history] for state in (one, two)]
    pairs = [(one.network, two.network), (one.average, two.average)]
    weights = all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)
    moments = list(zip(_moments(one), _moments(two), strict=True))
    history = rows[0] == [pytest.approx(row, rel=rounding, abs=0) for row in rows[1]]
    return weights and history and all(torch.equal(a[key], b[key]) for a, b in moments for key in a)


def _moments(state: checkpoint.Checkpoint) -> list[dict[str, torch.Tensor]]:
    return [moments for optimizer in state.optimizers.values() for moments in optimizer["state"].values()]


@pytest.fixture(scope="session")
def finished(data: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tiny"
    train(config(), data, out, CPU)
    return out


def test_a_run_leaves_checkpoint_history_and_tensorboard(finished: Path) -> None:
    rows = list(csv.DictReader((finished / "history.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[1]["loss"]) < float(rows[0]["loss"])
    assert list((finished / "tensorboard").glob("events.*"))
    state = checkpoint.load(finished)
    assert state.step == 2 * 7  # 340 pictures in batches of 50
    assert state.classes == tuple("0123456789")
    assert not list(finished.glob("*.part"))


def test_a_run_repeats_bit_for_bit(finished: Path, data: DataSet, tmp_path: Path) -> None:
    train(config(), data, tmp_path / "again", CPU)
    assert same(finished, tmp_path / "again")


def test_another_seed_gives_another_result(finished: Path, data: DataSet, tmp_path: Path) -> None:
    train(config(seed=1), data, tmp_path / "other", CPU)
    assert not same(finished, tmp_path / "other")


def test_a_run_stopped_in_the_middle_of_an_epoch_resumes_to_the_same_numbers(
    finished: Path, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stops, the first after the third of an epoch's seven steps."""
    answers = [False, False, True, *[False] * 6, True]
    with monkeypatch.context() as patch:
        patch.setattr(Place, "any", lambda self, flag: bool(answers and answers.pop(0)))
        with pytest.raises(StoppedError, match="stopped at step 3; continue with the same command and --resume"):
            train(config(), data, tmp_path, CPU)
        assert checkpoint.load(tmp_path).history == []
        with pytest.raises(StoppedError, match="stopped at step 10"):
            train(config(), data, tmp_path, CPU, resume=True)
    train(config(), data, tmp_path, CPU, resume=True)
    assert same(finished, tmp_path)


def test_a_signal_during_validation_stops_after_the_next_step(
    finished: Path, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of several processes validates: if it left at once, the others would wait for it for ever."""
    with monkeypatch.context() as patch:
        patch.setattr("training.train.fixed_batches", lambda *_: [signal.raise_signal(signal.SIGINT)] and [])
        patch.setattr("training.train.evaluate", lambda model, batches, classes: Evaluation(1, 0, torch.zeros(1, 1), 0.0))
        with pytest.raises(StoppedError, match="stopped at step 8; continue"):
            train(config(), data, tmp_path, CPU)
    train(config(), data, tmp_path, CPU, resume=True)
    one, two = checkpoint.load(finished), checkpoint.load(tmp_path)
    assert all(torch.equal(one.network[key], two.network[key]) for key in one.network)


def test_a_resumed_run_keeps_its_precision(data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` depends on the processor, and the run may resume on another."""
    monkeypatch.setattr("training.devices._multiplies_bf16", lambda _: True)
    train(config(epochs=1, precision="auto"), data, tmp_path / "run", CPU)
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    train(config(epochs=1, cycles=2, precision="auto"), data, tmp_path / "run", CPU, resume=True)
    monkeypatch.setattr("training.devices._multiplies_bf16", lambda _: False)
    train(config(epochs=1, cycles=2, precision="auto"), data, tmp_path / "elsewhere", CPU, resume=True)
    assert same(tmp_path / "run", tmp_path / "elsewhere")
    assert checkpoint.load(tmp_path / "elsewhere").precision == "bf16"


@pytest.mark.parametrize(("preset", "rate", "muon"), [("pooled", 1, 0), ("tiny", 4, 0), ("tiny", 0.5, 0.02)])
def test_dropout_and_rates_resume_to_the_same_numbers_too(
    preset: str, rate: float, muon: float, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(PRESETS[preset].network, stem=PRESETS["tiny"].network.stem, dropout=0.5)
    settings = replace(config(preset, transform_rate=rate, muon=muon), network=small)
    train(settings, data, tmp_path / "whole", CPU)
    answers = [False, True]
    with monkeypatch.context() as patch:
        patch.setattr(Place, "any", lambda self, flag: bool(answers and answers.pop(0)))
        with pytest.raises(StoppedError):
            train(settings, data, tmp_path / "parts", CPU)
    train(settings, data, tmp_path / "parts", CPU, resume=True)
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_muon_is_rejected_for_a_network_without_matrices(data: DataSet, tmp_path: Path) -> None:
    bare = replace(PRESETS["pooled"].network, stem=PRESETS["tiny"].network.stem)
    with pytest.raises(SettingError, match="muon is for transformations and for convolutions after the first"):
        train(replace(config("pooled", muon=0.02), network=bare), data, tmp_path / "run", CPU)


def test_a_finished_run_continues_for_another_cycle(finished: Path, data: DataSet, tmp_path: Path) -> None:
    """The rate rises again and ends where it ended before, and the result is the same as of two cycles in one go."""
    train(config(cycles=2), data, tmp_path / "whole", CPU)
    shutil.copytree(finished, tmp_path / "parts")
    train(config(cycles=2), data, tmp_path / "parts", CPU, resume=True)
    assert same(tmp_path / "whole", tmp_path / "parts")
    state = checkpoint.load(tmp_path / "parts")
    assert state.config.training.cycles == 2
    rates = [row["learning_rate"] for row in state.history]
    assert len(rates) == 4
    assert rates[2:] == rates[:2]
    with pytest.raises(
        CheckpointError, match=r"training\.cycles: 2 against 1\. Resume with the settings .* \(only --cycles may grow\)"
    ):
        train(config(), data, tmp_path / "parts", CPU, resume=True)


@pytest.fixture(scope="session")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once("whole", lambda out: train_here(long_run(folder), out), tmp_path_factory)


def long_run(folder: Path) -> list[str]:
    """Arguments of a run that lasts long enough to be interrupted."""
    flags = ["--data", str(folder), "--dataset", "folder", "--validation", "60", "--batch-size", "10", "--epochs", "5"]
    return ["train", "--preset", "tiny", *flags]


def train_here(arguments: list[str], out: Path, *flags: str) -> None:
    """Train in this process, since another would take seconds to import torch."""
    assert main([*arguments, "--out", str(out), *flags]) == 0


def train_in_processes(command: list[str], out: Path, *flags: str) -> None:
    """Train in processes; if they fail, their output is shown, the only way to learn why a rare failure happened."""
    done = subprocess.run([*command, "--out", str(out), *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_resumes_to_the_same_numbers(
    number: signal.Signals, folder: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """SIGINT saves the current step and says how to resume, as SIGTERM does below; after SIGKILL the last epoch is there."""
    process = subprocess.Popen([*CAPTRAIN, *long_run(folder), "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "history.csv").exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(number)
    _, message = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert "continue with the same command and --resume" in message
    assert len(checkpoint.load(tmp_path).history) < 5
    train_here(long_run(folder), tmp_path, "--resume")
    assert same(uninterrupted, tmp_path)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_second_signal_ends_a_run_at_once(number: signal.Signals, status: int, folder: Path, tmp_path: Path) -> None:
    """The first one waits for the next step, which may take long: here a validation takes ten minutes."""
    program = (
        "import sys, time\nfrom training import train\nfrom training.__main__ import main\n"
        # In short pieces: a signal that comes just before a sleep has no effect until the sleep ends.
        "train.fixed_batches = lambda *_: [print('validating', flush=True), *(time.sleep(0.5) for _ in range(1200))]\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *long_run(folder), "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "validating\n" in iter(process.stdout.readline, "")
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)  # sent sooner, the two signals might arrive as one
        process.send_signal(number)
        assert process.wait(60) == status
        assert "continue with the same command" not in process.communicate()[1]
    finally:
        process.kill()
        process.communicate()
    assert not (tmp_path / checkpoint.FILE).exists()


def test_schedule_augmentation_and_loss_weights_follow_the_config(finished: Path, data: DataSet, tmp_path: Path) -> None:
    """Changing the augmentation or a weight makes a different run; the rates are the schedule's own."""
    state = checkpoint.load(finished)
    last = [(7 * epoch - 1) / 14 for epoch in (1, 2)]
    expected = [SCHEDULES["one_cycle"](progress, state.config.training) * 0.01 for progress in last]
    assert [row["learning_rate"] for row in state.history] == pytest.approx(expected)
    first = state.history[0]["loss"]
    for name, changed in {"none": {"augment": "none"}, "heavy": {"reconstruction": 0.05}}.items():
        other = train(config(**changed), data, tmp_path / name, CPU)
        assert not same(finished, tmp_path / name)
        ratio = other.history[0]["loss"] / first
        assert ratio > 5 if name == "heavy" else 0.5 < ratio < 2


def test_the_first_step_is_adam_on_the_papers_loss(data: DataSet, tmp_path: Path) -> None:
    """One step of one batch, written out by hand from the same initial weights."""
    settings = config(epochs=1, batch_size=340, augment="none", schedule="constant", precision="fp32", ema=0.0)
    torch.manual_seed(settings.training.seed)
    network = Network(settings.network)
    learn, _ = data.split(60)
    images, labels = learn.images.float() / 255, learn.labels.unsqueeze(1)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.training.learning_rate)
    encoding, drawings = network(images, labels)
    loss = margin(encoding.lengths, labels) + 0.0005 * (drawings[:, 0] - images).square().sum() / 340
    loss.backward()
    optimizer.step()
    done = train(settings, data, tmp_path, CPU)
    assert done.history[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    for key, weights in network.state_dict().items():  # Adam's first step is the gradient's sign: rounding may flip a few
        near = (done.network[key].float() - weights.float()).abs() < 1e-3
        assert float(near.float().mean()) > 0.98


class Sealed:
    """Stands in for the test digits, and fails when it is read."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError("the test digits were read")


def test_training_and_export_read_no_test_digit(data: DataSet, tmp_path: Path) -> None:
    sealed = replace(data, test=Sealed())  # type: ignore[arg-type]
    done = train(config(batch_size=20), sealed, tmp_path / "run", CPU)  # with conftest's weights, whose graphs exist
    made = export(done, sealed, tmp_path / "mine", quantised=True, say=lambda _: None)
    assert {each.error.count for each in made.manifest.metrics.validation.values()} == {60}


def test_pairs_from_files_sorted_by_class_can_be_exported(data: DataSet, tmp_path: Path) -> None:
    """Pairs are of different classes, and the first thousand digits here are all of one."""
    first = torch.nonzero(data.train.labels == 0)[:, 0]
    often = first.repeat(1000 // len(first) + 1)
    learn = data.train[torch.cat([often, data.train.labels.argsort(stable=True), torch.arange(60)])]
    ordered = replace(data, train=learn)
    quick = replace(config(epochs=1, batch_size=500, pairs="overlapping"), network=replace(config().network, iterations=1))
    done = train(quick, ordered, tmp_path / "run", CPU)
    assert export(done, ordered, tmp_path / "mine", quantised=True, say=lambda _: None).manifest.max_objects == 2


def test_training_warns_about_dark_on_light_pictures(data: DataSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inverted = replace(data, train=replace(data.train, images=255 - data.train.images))
    for each, told in ((data, False), (inverted, True)):
        train(config(epochs=1), each, tmp_path / str(told), CPU)
        assert ("look dark on light" in capsys.readouterr().out) == told


def test_resuming_completes_a_history_cut_short_by_a_kill(finished: Path, data: DataSet, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    whole = (run / "history.csv").read_text()
    (run / "history.csv").write_text(whole.rpartition("\n2,")[0])
    train(config(), data, run, CPU, resume=True)
    assert (run / "history.csv").read_text() == whole


def test_the_average_follows_each_step(data: DataSet, tmp_path: Path) -> None:
    settings = config(epochs=1, batch_size=340, schedule="constant", precision="fp32", ema=0.9)
    torch.manual_seed(settings.training.seed)
    before = Network(settings.network).state_dict()
    done = train(settings, data, tmp_path, CPU)
    for key, weights in before.items():
        if weights.is_floating_point():  # at the first step the decay is a tenth
            expected = 0.1 * weights.float() + 0.9 * done.network[key].float()
            torch.testing.assert_close(done.average[key].float(), expected, rtol=1e-4, atol=1e-5)


def test_only_transformations_learn_at_the_transform_rate(data: DataSet, tmp_path: Path) -> None:
    """Adam's first step has the same length for all weights, so the transformations move four times as far."""
    one_step = {"epochs": 1, "batch_size": 340, "schedule": "constant", "precision": "fp32", "ema": 0.0}
    done = [train(config(transform_rate=rate, **one_step), data, tmp_path / str(rate), CPU) for rate in (1.0, 4.0)]
    torch.manual_seed(done[0].config.training.seed)
    before = Network(done[0].config.network).state_dict()
    for key in before:
        slow, fast = (float((state.network[key].float() - before[key].float()).abs().median()) for state in done)
        if slow > 0:  # not batch norm's counters
            assert fast / slow == pytest.approx(4 if key == "encoder.routed.transforms" else 1, rel=0.01), key
    assert done[1].history[0]["learning_rate"] == 0.01


def test_muon_moves_matrices_by_its_own_rates_and_leaves_all_else_to_adam(data: DataSet, tmp_path: Path) -> None:
    """After the first step, Muon's matrices have moved about as far in each direction, Adam's weights in each value."""
    one_step = {"epochs": 1, "batch_size": 340, "schedule": "constant", "precision": "fp32", "ema": 0.0}
    done = train(config(muon=0.02, transform_rate=0.5, **one_step), data, tmp_path, CPU)
    torch.manual_seed(done.config.training.seed)
    before = Network(done.config.network).state_dict()
    moved = {key: done.network[key].float() - weights.float() for key, weights in before.items()}
    kernels = torch.linalg.svdvals(moved["encoder.primary.convolution.weight"].flatten(1))
    turned = torch.linalg.svdvals(moved["encoder.routed.transforms"].unflatten(2, (10, 6)).transpose(1, 2))
    assert 0.7 < kernels.median() / 0.02 < 1.2
    assert 0.7 < turned.median() / 0.01 < 1.2
    assert float(moved["encoder.stem.0.weight"].abs().median()) == pytest.approx(0.01, rel=0.01)


def test_a_run_of_an_older_version_can_be_exported_but_not_resumed(finished: Path, data: DataSet, tmp_path: Path) -> None:
    values = torch.load(finished / checkpoint.FILE, weights_only=True)
    values["optimizer"] = values.pop("optimizers")["adam"]
    torch.save(values, tmp_path / checkpoint.FILE)
    assert checkpoint.load(tmp_path).restored().encoder
    with pytest.raises(CheckpointError, match="can be exported and measured, but not resumed"):
        train(config(cycles=2), data, tmp_path, CPU, resume=True)


def test_an_optimizer_state_of_another_version_is_rejected(finished: Path, data: DataSet, tmp_path: Path) -> None:
    state = checkpoint.load(finished)
    groups = state.optimizers["adam"]["param_groups"]
    groups.append({**groups[0], "params": []})
    checkpoint.save(state, tmp_path)
    with pytest.raises(CheckpointError, match="or another version wrote them"):
        train(config(cycles=2), data, tmp_path, CPU, resume=True)


def test_resuming_with_other_class_names_is_rejected(finished: Path, data: DataSet, tmp_path: Path) -> None:
    renamed = replace(data, classes=tuple("abcdefghij"))
    shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(CheckpointError, match="was begun with the classes 0, 1, .*, found a, b, .*; put classes.txt back"):
        train(config(cycles=2), renamed, tmp_path / "run", CPU, resume=True)


def test_two_runs_cannot_train_into_one_folder(data: DataSet, tmp_path: Path) -> None:
    with checkpoint.locked(tmp_path), pytest.raises(CheckpointError, match="another process trains into"):
        train(config(epochs=1), data, tmp_path, CPU)
    assert not (tmp_path / checkpoint.FILE).exists()


def test_training_refuses_to_write_into_a_bundle(data: DataSet, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match="holds a bundle"):
        train(config(epochs=1), data, tmp_path, CPU)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_a_folder_that_holds_a_run_is_not_overwritten(finished: Path, data: DataSet) -> None:
    with pytest.raises(CheckpointError, match="already holds a run; pass --resume"):
        train(config(), data, finished, CPU)


def test_resuming_with_another_config_names_both(finished: Path, data: DataSet) -> None:
    with pytest.raises(CheckpointError, match=r"training\.learning_rate: 0\.01 against 0\.5"):
        train(config(learning_rate=0.5), data, finished, CPU, resume=True)
    with pytest.raises(CheckpointError, match=r"another config \(tiny\) than asked for \(pooled\)"):
        train(config("pooled"), data, finished, CPU, resume=True)


def test_resuming_with_other_pictures_is_rejected(finished: Path, folder: Path, data: DataSet) -> None:
    others = replace(data, train=data.train[torch.arange(400).flip(0)])
    with pytest.raises(
        DataError, match=r"expected the training pictures that were learned .* pass the --data it was trained with"
    ):
        train(config(), others, finished, CPU, resume=True)


def test_resuming_with_another_number_of_processes_is_rejected(finished: Path, data: DataSet) -> None:
    with pytest.raises(CheckpointError, match="was trained by 1 processes, found 2; another number would give other results"):
        train(config(), data, finished, replace(CPU, world=2), resume=True)


def test_a_run_records_every_machine_that_it_trained_on(
    finished: Path, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    began = checkpoint.load(finished).hardware
    for cycles, machine in ((2, "a GPU"), (3, "a GPU"), (3, "one that has nothing to do")):
        monkeypatch.setattr("training.train.hardware", lambda *_, name=machine: name)
        train(config(cycles=cycles), data, tmp_path / "run", CPU, resume=True)
    assert checkpoint.load(tmp_path / "run").hardware == f"{began}, then a GPU"


@pytest.mark.parametrize("objects", ["overlapping", "side_by_side"])
def test_pairs_need_more_than_two_classes(objects: str, data: DataSet, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pictures of 2 objects need more classes than that to choose from, found 2"):
        train(config(pairs=objects), replace(data, classes=("a", "b")), tmp_path, CPU)


@pytest.fixture
def poisoned(finished: Path, tmp_path: Path) -> Path:
    """A run of three epochs after its second, whose next step turns every weight of a layer into NaN."""
    state = checkpoint.load(finished)
    state.config = replace(config(epochs=3), network=state.config.network)
    _moments(state)[0]["exp_avg"].fill_(float("nan"))
    checkpoint.save(state, tmp_path)
    return tmp_path


def test_a_nan_loss_exits_with_status_3_and_keeps_the_last_checkpoint(
    poisoned: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (poisoned / checkpoint.FILE).read_bytes()
    flags = ["--data", str(folder), "--dataset", "folder", "--validation", "60", "--batch-size", "50", "--epochs", "3"]
    assert main(["train", "--preset", "tiny", *flags, "--out", str(poisoned), "--resume"]) == 3
    told = capsys.readouterr().err
    assert "the loss is nan at step" in told
    assert f"the last good checkpoint is {poisoned / checkpoint.FILE}" in told
    assert (poisoned / checkpoint.FILE).read_bytes() == before


def test_weights_that_are_not_finite_never_replace_a_checkpoint(
    poisoned: Path, data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped right after the step that poisons the weights, before any loss could show it."""
    before = (poisoned / checkpoint.FILE).read_bytes()
    monkeypatch.setattr(Place, "any", lambda self, flag: True)
    with pytest.raises(DivergedError, match="a weight is not finite at step 15; the last good checkpoint is"):
        train(config(epochs=3), data, poisoned, CPU, resume=True)
    assert (poisoned / checkpoint.FILE).read_bytes() == before


@pytest.mark.parametrize("field", ["schedule", "augment", "loss", "precision", "pairs"])
def test_an_unknown_name_lists_the_valid_ones(field: str, data: DataSet, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown .* 'nonsense'; choose one of: \w+, "):
        train(config(**{field: "nonsense"}), data, tmp_path / "run", CPU)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("pairs", ["overlapping", "side_by_side"])
def test_pairs_are_trained_on_the_canvas_of_their_arrangement(pairs: str, data: DataSet, tmp_path: Path) -> None:
    done = train(config("shared", pairs=pairs, epochs=1, validation=360), data, tmp_path, CPU)
    assert done.config.network.image_shape == {"overlapping": (1, 36, 36), "side_by_side": (1, 28, 56)}[pairs]
    assert len(done.history) == 1


def test_two_processes_learn_what_one_does(folder: Path, tmp_path: Path) -> None:
    """torchrun with DDP over gloo: each learns from half of every batch, and the weights end the same but for rounding."""
    flags = ["train", "--preset", "shared", "--data", str(folder), "--dataset", "folder", "--validation", "359", "--epochs", "2"]
    flags += [
        "--batch-size",
        "20",  # 41 pictures: a last batch of one, which only one process can learn from
        "--augment",
        "none",
        "--precision",
        "fp32",
        "--ema",
        "0",
    ]
    train_here(flags, tmp_path / "one")
    train_in_processes([*TORCHRUN, *flags], tmp_path / "two")
    one, two = (checkpoint.load(tmp_path / out) for out in ("one", "two"))
    assert one.step == two.step == 6
    for mine, theirs in zip(one.history, two.history, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-3)
        assert theirs["training_error"] == mine["training_error"]
    for key, weights in one.network.items():
        torch.testing.assert_close(two.network[key], weights, atol=2e-3, rtol=1e-2)


@pytest.mark.timeout(600)  # torchrun starts four times, each of its processes imports torch
def test_two_processes_stop_together_and_resume_to_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    """First only one of them is told, not the one that saves; then torchrun is, which tells both."""
    command = [*TORCHRUN, *long_run(folder)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_in_processes(command, whole)
    for flags, done in (([], 0), (["--resume"], 1)):
        process = subprocess.Popen([*command, "--out", str(parts), *flags], stderr=subprocess.PIPE, text=True)
        try:
            history = parts / "history.csv"
            while not (history.exists() and len(history.read_text().splitlines()) > 1 + done):
                assert process.poll() is None
                time.sleep(0.01)
            os.kill(process.pid if flags else worker(process.pid, rank=1), signal.SIGTERM)
            _, message = process.communicate(timeout=60)
        finally:
            process.terminate()  # torchrun ends its processes too
            process.communicate()
        state = checkpoint.load(parts)
        assert f"stopped at step {state.step}; continue with the same command and --resume" in message
        assert state.step % 34, "expected a checkpoint from the middle of an epoch"
    train_in_processes(command, parts, "--resume")
    assert same(whole, parts, rounding=1e-6)  # a stopped epoch's losses are added up in another order


def worker(torchrun: int, rank: int) -> int:
    """The process that torchrun started with this rank."""
    for each in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"\0RANK={rank}\0" in Path(f"/proc/{each}/environ").read_text():
            return int(each)
    raise AssertionError(f"torchrun started no process of rank {rank}")


def test_validation_measures_the_network_that_is_restored(data: DataSet, tmp_path: Path) -> None:
    """The average, where there is one."""
    done = train(config(epochs=1, batch_size=100, learning_rate=0.1), data, tmp_path, CPU)
    measured = evaluate(TorchModel(done.restored()), fixed_batches(data.split(60)[1], "none"), 10)
    row = done.history[-1]
    assert row["validation_error"] == pytest.approx(measured.error)
    assert row["validation_reconstruction_error"] == pytest.approx(measured.reconstruction_error, rel=1e-5)


def test_batch_norm_keeps_learning_after_a_validation(data: DataSet, tmp_path: Path) -> None:
    """Without an average it is the network itself that is validated."""
    done = train(config(batch_size=100, ema=0.0), data, tmp_path, CPU)
    assert int(done.network["encoder.stem.1.num_batches_tracked"]) == done.step
