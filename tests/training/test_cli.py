"""`captrain` from outside: the four commands in the order a researcher types them."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from service import bundle
from service.bundle import Bundle
from service.manifest import BundleError
from tests.sharing import made_once
from tests.training import drawn
from tests.waiting import until
from training import checkpoint
from training.__main__ import main
from training.augment import AUGMENTATIONS
from training.config import PRESETS
from training.data import DataSet
from training.devices import DTYPES
from training.errors import TrainingError
from training.losses import LOSSES
from training.networks import Encoding
from training.pairs import ARRANGEMENTS
from training.routing import ROUTINGS
from training.schedules import SCHEDULES
from training.sources import SOURCES
from training.subjects import Subject, opened, seeds_of_one_bundle

ROOT = Path(__file__).parents[2]
FLAGS = ["--dataset", "folder", "--validation", "60", "--epochs", "2", "--batch-size", "20"]


def captrain(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it as a process, each command at least once (`train` in test_train.py); other tests save the import of torch."""
    return subprocess.run([sys.executable, "-m", "training", *map(str, arguments)], capture_output=True, text=True)


def called(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same program, in this process."""
    words, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(words), redirect_stderr(errors):
        status = main([str(each) for each in arguments])
    return subprocess.CompletedProcess(["captrain", *arguments], status, words.getvalue(), errors.getvalue())


@pytest.fixture(scope="session")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(out: Path) -> None:
        done = called("train", "--preset", "tiny", "--data", folder, "--out", out, *FLAGS)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^tiny in (fp32|bf16): dataset folder, epochs 2, .*batch_size 20", done.stdout, re.MULTILINE)
        assert "10 classes: 340 pictures to learn from, 60 held out to choose by\n" in done.stdout
        assert "epoch 2/2  loss" in done.stdout
        assert "img/s" in done.stderr  # the progress bar

    return made_once("tiny", make, tmp_path_factory)


def test_only_processes_of_a_group_skip_the_interpreters_shutdown() -> None:
    """It ends with os._exit: threads that outlive their group, as gloo's do, would abort an interpreter that shuts down."""
    marked = "import atexit, training.__main__ as captrain; atexit.register(print, 'taken apart');"
    refused = f"{marked} import sys; sys.modules['torch'] = None; raise SystemExit(captrain.main(['evaluate', 'x']))"
    mistyped = f"{marked} captrain.main(['evaluate'])"
    fault = f"{marked} captrain._run = lambda _: 1 // 0; captrain.main()"

    def ended(script: str, world: str, redirected: str = "") -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, script]
        return subprocess.run(command, env=os.environ | {"WORLD_SIZE": world}, capture_output=True, text=True, cwd=ROOT)

    for script, world, redirected, after, told in (
        (refused, "2", "", "", "torch is not installed"),
        (mistyped, "2", ">&-", "", "required: RUN_OR_BUNDLE"),
        (mistyped, "", "", "taken apart\n", "required: RUN_OR_BUNDLE"),
        (refused, "1", "", "taken apart\n", "torch is not installed"),
    ):
        done = ended(script, world, redirected)
        assert (done.returncode, done.stdout) == (2, after)
        assert told in done.stderr
        assert "Traceback" not in done.stderr
    done = ended(fault, "2")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ZeroDivisionError" in done.stderr


def test_waiting_openmp_threads_do_not_spin(tmp_path: Path) -> None:
    """OpenMP itself prints its settings when torch loads it."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | {"OMP_DISPLAY_ENV": "verbose"}
    command = [sys.executable, "-m", "training", "evaluate", str(tmp_path)]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True).stderr
    assert "GOMP_SPINCOUNT = '0'" in shown


def test_the_help_names_every_preset_and_routing() -> None:
    shown = " ".join(captrain("train", "--help").stdout.split())
    assert ", ".join(PRESETS) in shown
    assert " or ".join(ROUTINGS) in shown
    for table in (AUGMENTATIONS, ARRANGEMENTS, LOSSES, SCHEDULES, DTYPES, SOURCES):
        for name in table:
            assert name in shown


def test_a_run_resumes_only_with_the_settings_it_was_started_with(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    assert called("train", "--preset", "tiny", "--data", folder, "--out", out, *FLAGS).returncode == 0
    other = called("train", "--preset", "paper", "--data", folder, "--out", out, "--resume")
    assert f"{out} is a run of tiny, not of paper; omit --preset to continue" in other.stderr
    other = called("train", "--data", folder, "--out", out, "--resume", "--batch-size", "7")
    assert "training.batch_size: 20 against 7. Resume with the settings it was started with" in other.stderr
    before = checkpoint.load(out)
    done = called("train", "--data", folder, "--out", out, "--resume", "--cycles", "2")
    assert done.returncode == 0, done.stderr
    after = checkpoint.load(out)
    assert after.history[: len(before.history)] == before.history
    assert len(after.history) == 2 * len(before.history)


def test_a_new_run_requires_a_preset(tmp_path: Path) -> None:
    done = called("train", "--out", tmp_path / "none")
    assert done.returncode == 2
    assert "expected --preset with one of paper, compact" in done.stderr


@pytest.mark.parametrize("flag", ["augment", "loss", "schedule", "pairs", "precision", "routing"])
def test_an_unknown_name_is_rejected_before_pictures_are_looked_for(flag: str, tmp_path: Path) -> None:
    done = called("train", "--preset", "tiny", f"--{flag}", "afine", "--data", tmp_path / "nowhere", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "unknown" in done.stderr
    assert "'afine'; choose one of: " in done.stderr


def test_a_finished_run_says_so_when_it_is_resumed(run: Path, folder: Path) -> None:
    done = called("train", "--preset", "tiny", "--data", folder, "--out", run, *FLAGS, "--resume")
    assert done.returncode == 0
    assert "is already at epoch 2 of 2: evaluate or export it" in done.stdout


def test_a_missing_package_is_reported_with_how_to_install_it(run: Path, folder: Path) -> None:
    """They are missing one after the other, in the order in which they are imported, so that one process is enough."""
    packages = ["torch", "onnx", "onnxruntime", "tqdm"]
    program = (
        f"import sys\nfrom training.__main__ import main\nfor package in {packages}:\n"
        "    sys.modules[package] = None\n    print(main(sys.argv[1:]))\n    del sys.modules[package]"
    )
    command = [sys.executable, "-c", program, "evaluate", str(run), "--data", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["2"] * len(packages)
    told = [f"captrain: {package} is not installed; `make install` in the checkout installs it" for package in packages]
    assert done.stderr.splitlines() == told


@pytest.mark.parametrize("verb", ["evaluate", "export", "figures"])
def test_pictures_of_another_size_than_the_runs_are_rejected(verb: str, run: Path, tmp_path: Path) -> None:
    other = drawn.write(tmp_path / "small", side=20)
    target = {"evaluate": [], "export": ["--bundle", tmp_path / "x"], "figures": ["--out", tmp_path / "y"]}[verb]
    done = called(verb, run, *target, "--data", other)
    assert done.returncode == 2
    assert f"{other}: expected pictures that make inputs of (1, 28, 28), found (1, 20, 20); pass the --data" in done.stderr
    assert "Traceback" not in done.stderr


def test_export_rejects_other_pictures_of_the_same_size(run: Path, tmp_path: Path) -> None:
    done = called("export", run, "--bundle", tmp_path / "x", "--data", drawn.write(tmp_path / "others", seed=5))
    assert done.returncode == 2
    assert "expected the training pictures that were learned (sha256" in done.stderr
    assert "pass the --data it was trained with" in done.stderr
    assert not (tmp_path / "x").exists()


def test_an_export_stopped_by_sigterm_leaves_nothing_behind(run: Path, folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training", "export", str(run), "--bundle", str(tmp_path / "x"), "--data", str(folder)]
    with subprocess.Popen(command) as export:
        until(lambda: list(tmp_path.glob(".export-*/x/*")), seconds=180, pause=0.01)  # its first graph is there
        export.terminate()
    assert export.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="session")
def made(run: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(out: Path) -> None:
        done = captrain("export", run, "--bundle", out, "--int8", "--data", folder)
        assert done.returncode == 0, done.stderr
        assert "fp32, int8" in done.stdout

    shared = made_once("shapes", make, tmp_path_factory)
    return shutil.copytree(shared, tmp_path_factory.mktemp("models") / "shapes")  # tests record results in this copy


def test_evaluate_measures_a_run_in_torch_and_in_onnx_runtime(run: Path, folder: Path) -> None:
    done = captrain("evaluate", run, "--data", folder)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert len(errors) == 2
    assert f"(torch) on the 60 test pictures in {folder}" in done.stdout
    assert f"(fp32) on the 60 test pictures in {folder}" in done.stdout


def test_evaluate_exits_quietly_when_the_reader_closes_the_pipe(made: Path, folder: Path) -> None:
    command = f"{sys.executable} -m training evaluate {made} --data {folder} | true; exit ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_evaluate_records_test_figures_in_a_bundle_only_on_request(made: Path, folder: Path) -> None:
    before = json.loads((made / "manifest.json").read_text())
    assert called("evaluate", made, "--data", folder).returncode == 0
    assert json.loads((made / "manifest.json").read_text()) == before
    assert called("evaluate", made, "--data", folder, "--record").returncode == 0
    after = json.loads((made / "manifest.json").read_text())
    assert set(after["metrics"]["test"]) == {"fp32", "int8"}
    assert after["metrics"]["test"]["fp32"]["error"]["count"] == 60
    assert after["version"] == before["version"]
    assert after["files"] == before["files"]


def test_evaluate_records_runs_of_other_seeds_beside_the_bundle(made: Path, folder: Path, tmp_path: Path) -> None:
    other = called("train", "--preset", "tiny", *FLAGS, "--data", folder, "--out", tmp_path / "other", "--seed", "7")
    assert other.returncode == 0, other.stderr
    done = called("evaluate", made, tmp_path / "other", "--data", folder, "--record")
    assert done.returncode == 0, done.stderr
    (seed,) = json.loads((made / "manifest.json").read_text())["metrics"]["other_seeds"]
    assert seed["seed"] == 7
    assert f"error {seed['test']['percent']:.2f} % ({seed['test']['errors']} of 60;" in done.stdout
    assert called("evaluate", made, "--data", folder, "--record").returncode == 0
    assert json.loads((made / "manifest.json").read_text())["metrics"]["other_seeds"] == [seed]  # kept


def test_evaluate_accepts_any_files_of_the_same_classes_unless_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known set's own files must have its checksums; to measure, any other files of the same classes will do."""
    bundle = ROOT / "tests/bundles/tiny"
    digits = tmp_path / "digits"
    drawn.write(digits)
    done = called("evaluate", bundle, "--data", digits)
    assert done.returncode == 0, done.stderr
    assert f"test pictures in {digits}" in done.stdout
    done = called("evaluate", bundle, "--data", digits, "--record")
    assert done.returncode == 2
    assert "expected md5" in done.stderr
    monkeypatch.setenv("CAPSERVE_DATA", str(digits))
    assert "expected md5" in called("evaluate", bundle).stderr  # not named with --data
    (digits / "classes.txt").write_text("\n".join("1023456789"))
    assert "expected pictures of the classes 0, 1, 2, 3," in called("evaluate", bundle, "--data", digits).stderr
    (digits / "classes.txt").write_text("\n".join("nought one two three four five six seven eight nine".split()))
    done = called("evaluate", bundle, "--data", digits)
    assert done.returncode == 2
    assert "expected pictures of the classes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, found nought, one" in done.stderr


def test_evaluate_measures_other_pictures_but_refuses_to_record_them(made: Path, tmp_path: Path) -> None:
    before = (made / "manifest.json").read_bytes()
    others = drawn.write(tmp_path / "others", seed=5)
    told = called("evaluate", made, "--data", others).stdout
    assert f"(fp32) on the 60 test pictures in {others}" in told
    assert "dark on light" not in told
    done = called("evaluate", made, "--data", others, "--record")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{others}: expected the training pictures that were learned (sha256" in done.stderr
    assert (made / "manifest.json").read_bytes() == before


def test_evaluate_warns_about_dark_on_light_pictures(made: Path, tmp_path: Path) -> None:
    """/predict inverts such pictures, but evaluate does not: all would be wrong without a warning."""
    told = called("evaluate", made, "--data", drawn.write(tmp_path, dark=True)).stdout
    assert f"the pictures in {tmp_path} look dark on light and are used as they are" in told


def test_exporting_again_keeps_the_results_of_other_seeds(run: Path, folder: Path, made: Path, tmp_path: Path) -> None:
    copy = tmp_path / made.name
    shutil.copytree(made, copy)
    rate = {"errors": 3, "count": 60, "percent": 5.0, "low": 1.7, "high": 13.7}
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["metrics"]["other_seeds"] = seeds = [{"seed": 7, "test": rate}]
    manifest["metrics"]["test"] = manifest["metrics"]["validation"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    done = called("export", run, "--bundle", copy, "--data", folder)
    assert done.returncode == 0, done.stderr
    assert f"`captrain evaluate {copy} --record` counts them again" in done.stdout
    metrics = json.loads((copy / "manifest.json").read_text())["metrics"]
    assert (metrics["test"], metrics["other_seeds"]) == ({}, seeds)
    assert called("export", run, "--bundle", copy, "--data", folder, "--int8").returncode == 0  # again, before anyone measured it
    assert json.loads((copy / "manifest.json").read_text())["metrics"]["other_seeds"] == seeds
    (copy / "decoder.onnx").write_bytes(b"damaged")
    done = called("export", run, "--bundle", copy, "--data", folder)
    assert done.returncode == 0, done.stderr
    assert "replacing a damaged bundle" in done.stdout


def test_evaluate_records_no_seeds_beside_a_bundle_of_an_unfinished_run(folder: Path, tmp_path: Path) -> None:
    flags = ["--preset", "tiny", *FLAGS, "--data", folder]
    for seed, name in ((0, "run"), (7, "other")):
        assert called("train", *flags, "--out", tmp_path / name, "--seed", str(seed)).returncode == 0
    half = checkpoint.load(tmp_path / "run")
    half.history.pop()
    checkpoint.save(half, tmp_path / "run")
    assert called("export", tmp_path / "run", "--bundle", tmp_path / "half", "--data", folder).returncode == 0
    done = called("evaluate", tmp_path / "half", tmp_path / "other", "--data", folder, "--record")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected seed 0 after 2 epochs, found 1: finish it first" in done.stderr
    done = called("evaluate", tmp_path / "other", "--data", folder, "--record")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a bundle as the first, found a run" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "expected runs of different seeds, found the seeds 0, 0"),
        (["--seed", "7", "--augment", "strong"], "only in their seed, found training.augment: affine against strong"),
        (["--seed", "8"], "only in their seed, found other training pictures"),
    ],
)
def test_evaluate_rejects_runs_that_do_not_differ_only_in_their_seed(
    made: Path, folder: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    before = (made / "manifest.json").read_bytes()
    data = drawn.write(tmp_path / "others", seed=5) if flags == ["--seed", "8"] else folder
    assert called("train", "--preset", "tiny", *FLAGS, "--data", data, "--out", tmp_path / "other", *flags).returncode == 0
    done = called("evaluate", made, tmp_path / "other", "--data", folder, "--record")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert (made / "manifest.json").read_bytes() == before


def test_seeds_are_recorded_only_if_all_runs_ended_or_a_bundle_is_alone() -> None:
    tiny, made = PRESETS["tiny"], bundle.read(ROOT / "tests/bundles/tiny")

    def subject(seed: int, epochs: int, digest: str | None, made: Bundle | None = None) -> Subject:
        config = replace(tiny, training=replace(tiny.training, seed=seed, epochs=2))
        return Subject(config, ("0", "1"), [{}] * epochs, dict, made, digest)

    assert seeds_of_one_bundle([subject(0, 1, "x", made)]) is made
    assert seeds_of_one_bundle([subject(0, 2, None, made), subject(7, 2, "x")]) is made  # made before digests were stored
    with pytest.raises(TrainingError, match="expected seed 7 after 2 epochs, found 1: finish it first"):
        seeds_of_one_bundle([subject(0, 2, "x", made), subject(7, 1, "x")])


def test_a_network_trained_on_pairs_is_evaluated_on_pairs(data: DataSet) -> None:
    class Blank:
        def classify(self, images: Tensor) -> Encoding:
            assert images.shape[1:] == (1, 36, 36)
            return Encoding(torch.zeros(len(images), 10), torch.zeros(len(images), 10, 1))

        def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
            return torch.zeros(len(poses), 1, 36, 36)

    config = replace(PRESETS["tiny"], training=replace(PRESETS["tiny"].training, pairs="overlapping"))
    subject = Subject(config, data.classes, [], lambda: {"blank": Blank()}, None, None)
    ((name, evaluation),) = subject.evaluations(data)
    assert (name, evaluation.count) == ("blank", 60)


def test_a_bundle_whose_graphs_contradict_its_image_shape_is_rejected(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "tests/bundles/tiny", tmp_path / "tiny")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"image_shape": [1, 28, 29]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with opened(folder) as subject, pytest.raises(BundleError, match=r"inputs of .*expected .*28,29.*, found .*28,28"):
        subject.models  # noqa: B018


def test_figures_writes_pictures_and_redrawn_ones_differ(made: Path, folder: Path, tmp_path: Path) -> None:
    """The curves, which show no picture, are the same to the byte, so the others differ in what they show."""
    drawn: list[dict[str, bytes]] = []
    for out, by, flags in ((tmp_path / "plain", captrain, []), (tmp_path / "redrawn", called, ["--redrawn"])):
        done = by("figures", made, "--data", folder, "--out", out, *flags)
        assert done.returncode == 0, done.stderr
        assert sorted(out.iterdir()) == sorted(map(Path, done.stdout.split()))
        drawn.append({path.name: path.read_bytes() for path in out.iterdir()})
    plain, redrawn = drawn
    assert all(Image.open(io.BytesIO(content)).width > 300 for content in plain.values())
    both = plain.keys() & redrawn.keys()
    assert {"reconstructions.png", "perturbations.png"} <= both
    assert [name for name in both if plain[name] == redrawn[name]] == ["curves.png"]


def _with_defaults(arguments: list[str], folder: Path) -> list[str]:
    """Insert default flags before the mistaken ones, which then win."""
    return [*arguments[:1], *(FLAGS if arguments[0] == "train" else []), *arguments[1:], "--data", str(folder)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--preset", "papier", "--out", "x"], "unknown preset 'papier'; choose one of: baseline, compact"),
        (
            ["train", "--preset", "tiny", "--routing", "nonsense", "--out", "x"],
            "unknown routing 'nonsense'; choose one of: " + ", ".join(sorted(ROUTINGS)),
        ),
        (["train", "--preset", "pooled", "--routing", "dynamic", "--out", "x"], "preset pooled has no routing"),
        (["train", "--preset", "tiny", "--out", "x", "--batch-size", "0"], "batch-size must be from 1 to 1e+06, got 0"),
        (
            ["train", "--preset", "tiny", "--out", "x", "--learning-rate", "nan"],
            "learning-rate must be from 1e-08 to 10, got nan",
        ),
        (["train", "--preset", "tiny", "--out", "x", "--ema", "1.5"], "ema must be from 0 to 0.999999, got 1.5"),
        (["train", "--preset", "tiny", "--out", "x", "--epochs", "-1"], "epochs must be from 1 to 100000, got -1"),
        (["train", "--preset", "tiny", "--out", "x", "--iterations", "0"], "iterations must be from 1 to 100, got 0"),
        (["train", "--preset", "tiny", "--out", "/dev/null/x"], "Not a directory"),
        (["evaluate", "nowhere"], "neither a run (checkpoint.pt) nor a bundle (manifest.json) is there"),
        (["export", "nowhere", "--bundle", "x"], "no checkpoint there"),
    ],
)
def test_mistakes_are_reported_with_a_message_and_no_traceback(
    arguments: list[str], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = called(*_with_defaults(arguments, folder))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_evaluate_rejects_a_damaged_bundle(made: Path, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "shapes"
    copy.mkdir()
    for path in made.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    with (copy / "decoder.onnx").open("ab") as file:
        file.write(b"\0")
    done = called("evaluate", copy, "--data", folder)
    assert done.returncode == 2
    assert "sha256 of" in done.stderr
    assert "Traceback" not in done.stderr
