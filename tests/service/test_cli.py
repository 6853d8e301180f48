"""The command line as people use it: what it prints, what it refuses, and its exit statuses."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy as np
import pytest

from service import cli, commands
from service.bundle import Array
from service.engine import CapsNet
from service.errors import StartError
from service.process import listening
from service.settings import Settings
from tests.service.bundles import signed
from tests.service.conftest import BUNDLES, drawn, encoded, reaching
from tests.service.launching import CAPSERVE, run, started
from tests.waiting import until

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A `run` that starts no other process, for commands that do not serve."""

    def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            status = cli.run(arguments)
        except SystemExit as ended:
            status = ended.code
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    monkeypatch.setenv("CAPSERVE_MODELS", str(BUNDLES))
    monkeypatch.setattr(commands, "_restore_sigpipe", lambda: None)  # SIGPIPE would end the tests
    return run_here


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder of bundles, one with a flipped byte."""
    for name in ("one", "two"):
        shutil.copytree(BUNDLES / "tiny", tmp_path / "models" / name)
    graph = tmp_path / "models" / "two" / "encoder.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    return tmp_path / "models"


def test_serve_with_a_corrupt_bundle_exits_and_says_why(broken: Path) -> None:
    ended = run("serve", "--workers", "2", CAPSERVE_MODELS=str(broken))
    assert ended.returncode == 2
    assert "sha256 of" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_serve_on_cuda_without_a_gpu_exits_with_a_message() -> None:
    ended = run("serve", CAPSERVE_DEVICE="cuda")
    assert ended.returncode == 2
    assert "CUDA" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_serve_without_models_exits_and_warns_of_other_settings() -> None:
    """For example, that others can connect and no key is set: an empty key, as when its file was missing, is no key."""
    ended = run("serve", "--models=/nonexistent", CAPSERVE_HOST="0.0.0.0", CAPSERVE_API_KEY="", CAPSERVE_QUEUE="9")
    assert ended.returncode == 2
    assert "expected a folder of bundles, found No such file or directory; name another" in ended.stderr
    assert "no key is set: anyone who reaches 0.0.0.0 is answered" in ended.stderr
    (line,) = (each for each in ended.stderr.splitlines() if "but not settings" in each)
    assert "CAPSERVE_QUEUE" in line
    assert "CAPSERVE_PORT" not in line
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("models", "told"),
    [(BUNDLES / "tiny", "a bundle; name the folder that holds it"), ("/dev/null", "Not a directory; name another")],
)
def test_check_refuses_a_path_that_is_not_a_folder_of_bundles(models: Path | str, told: str, run_in_process: Run) -> None:
    ended = run_in_process("check", "--models", str(models))
    assert (ended.returncode, f"expected a folder of bundles, found {told}" in ended.stderr) == (2, True)


def test_serve_refuses_a_host_that_is_not_this_machines() -> None:
    ended = run("serve", "--host", "203.0.113.1")
    assert ended.returncode == 2
    assert "; choose another with CAPSERVE_HOST or CAPSERVE_PORT" in ended.stderr
    assert "Traceback" not in ended.stderr
    with pytest.raises(StartError, match=r"cannot listen on a\.\.b:0: "):
        listening.bind("a..b", 0)


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        ([], {"CAPSERVE_APIKEY": "secret"}, "CAPSERVE_APIKEY: there is no such setting; expected CAPSERVE_API_KEY"),
        ([], {"CAPSERVE_KEY": "secret"}, "CAPSERVE_KEY: there is no such setting; the key is CAPSERVE_API_KEY"),
        (
            [],
            {"CAPSERVE_API_KEY_FILE": "/run/key"},
            "CAPSERVE_API_KEY_FILE: there is no such setting; the key is CAPSERVE_API_KEY",
        ),
        ([], {"CAPSERVE_TOKEN": "sesame"}, "CAPSERVE_TOKEN: there is no such setting; the key is CAPSERVE_API_KEY"),
        ([], {"CAPSERVE_SECRET": "sesame"}, "CAPSERVE_SECRET: there is no such setting; the key is CAPSERVE_API_KEY"),
        ([], {"CAPSERVE_PASSWORD": "sesame"}, "CAPSERVE_PASSWORD: there is no such setting; the key is CAPSERVE_API_KEY"),
        ([], {"CAPSERVER_API_KEY": "secret"}, "CAPSERVE_API_KEY: expected this name, found CAPSERVER_API_KEY"),
        ([], {"CAPSERVE_PROT": "80"}, "CAPSERVE_PROT: there is no such setting; expected CAPSERVE_PORT"),
        ([], {"CAPSERVE_API_KEY": " \n"}, "CAPSERVE_API_KEY: expected printable ASCII"),
        (["--max-batch", "0"], {}, "capserve: --max-batch: expected a whole number from 1 to 1024, found 0"),
        (["--threads", "100000"], {}, "capserve: --threads: expected a whole number from 1 to 1024, found 100000"),
        (["--models", ""], {}, "capserve serve: error: --models: expected a value, found none; leave it out for the default"),
        (
            ["--por", "9100"],
            {},
            "usage: capserve serve [--FLAG VALUE ...]\ncapserve serve: error: there is no --por here; expected --port",
        ),
        (
            ["--trace=collector"],
            {},
            "usage: capserve serve [--FLAG VALUE ...]\ncapserve serve: error: there is no --trace here; expected --traces\n",
        ),
        (["--fast"], {}, "there is no --fast here; --help after the command lists the flags"),
        (["9100"], {}, "expected flags, found 9100"),
        (["--api-key", "sesame"], {}, "everybody on this machine could read: set CAPSERVE_API_KEY in the environment"),
        (["--api-key=sesame"], {}, "everybody on this machine could read: set CAPSERVE_API_KEY in the environment"),
        (["--port", "bad"], {"CAPSERVE_MAX_WAIT": "-1"}, "CAPSERVE_MAX_WAIT: expected"),
        ([], {"CAPSERVE_DEVICE": "tpu"}, "CAPSERVE_DEVICE: expected auto or cpu or cuda, found tpu"),
        (
            [],
            {"CAPSERVE_TRACES": "nonsense"},
            "CAPSERVE_TRACES: expected a URL such as http://collector:4318/v1/traces; what was found is kept secret",
        ),
        ([], {"CAPSERVE_TRACES": "collector:4318"}, "CAPSERVE_TRACES: expected a URL"),
        ([], {"CAPSERVE_TRACES": "http://:4318"}, "CAPSERVE_TRACES: expected a URL"),
        ([], {"CAPSERVE_TRACES": "http://[::1"}, "CAPSERVE_TRACES: expected a URL"),
        (
            [],
            {"CAPSERVE_TRACES": "http://a/b?key=sesame"},
            "CAPSERVE_TRACES: expected a URL without a query; a key goes into OTEL_",
        ),
    ],
)
def test_serve_refuses_invalid_settings_without_showing_secrets(
    arguments: list[str],
    environment: dict[str, str],
    told: str,
    run_in_process: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said before anything starts, so the test needs no separate process."""
    monkeypatch.setattr(commands, "serve", lambda _: 0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ended = run_in_process("serve", *arguments)
    assert (ended.returncode, told in ended.stderr, "sesame" in ended.stderr) == (2, True, False)


def test_predict_says_how_to_name_a_file_that_looks_like_a_flag(
    run_in_process: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `capserve predict *.png` may find one."""
    (tmp_path / "-seven.png").write_bytes(encoded(drawn("7")))
    monkeypatch.chdir(tmp_path)
    ended = run_in_process("predict", "-seven.png", "other.png")
    assert (ended.returncode, "-seven.png would be a flag; as a file it is ./-seven.png" in ended.stderr) == (2, True)
    assert run_in_process("predict", "./-seven.png").returncode == 0


def test_check_without_onnxruntime_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ModuleNotFoundError(name='onnxruntime')")
    ended = run("check", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    assert "pip install '.[cpu]'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("flag", "told"),
    [("--models=/nonexistent", "expected a folder of bundles"), ("--max-batch=0", "--max-batch: expected a whole number")],
)
def test_a_json_log_ends_with_the_fatal_error_as_json(flag: str, told: str) -> None:
    ended = run("serve", flag, CAPSERVE_LOG_FORMAT="json", CAPSERVE_HOST="0.0.0.0", CAPSERVE_API_KEY="sesame")
    assert ended.returncode == 2
    assert told in json.loads(ended.stderr.splitlines()[-1])["message"]
    assert "no key is set" not in ended.stderr


def test_predict_exits_with_a_message_when_stdout_is_full(seven: bytes) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*CAPSERVE, "predict", "-"],
            input=seven,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            env={**environment, "CAPSERVE_MODELS": str(BUNDLES)},
        )
    assert (ended.returncode, ended.stderr) == (2, b"capserve: standard output cannot be written: No space left on device\n")


def test_check_exits_with_a_message_when_stdout_is_closed(run_in_process: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    ended = run_in_process("check")
    assert (ended.returncode, ended.stderr) == (2, "capserve: standard output cannot be written: it is closed\n")


def test_ctrl_c_during_import_ends_serve_silently(tmp_path: Path) -> None:
    """That is, while it imports, which takes most of a second."""
    slow = "import time; print('importing', flush=True); time.sleep(30)"
    (tmp_path / "prometheus_client.py").write_text(slow)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([*CAPSERVE, "serve"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10) == (b"", b"")
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_while_workers_import_exits_without_a_traceback(tmp_path: Path) -> None:
    """A terminal sends the interrupt to all processes."""
    (tmp_path / "onnxruntime.py").write_text("import sys, time; print('importing', file=sys.stderr, flush=True); time.sleep(1)")
    log, environment = tmp_path / "log", {**os.environ, "CAPSERVE_MODELS": str(BUNDLES), "PYTHONPATH": str(tmp_path)}
    for pause in (0.0, 0.6):  # the earlier it comes, the less of a worker is there
        with log.open("wb") as output:
            command = [*CAPSERVE, "serve", "--port", "0", "--workers", "2"]
            process = subprocess.Popen(command, stderr=output, env=environment, start_new_session=True)
        until(lambda: "2 workers on" in log.read_text())
        time.sleep(pause)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 0
        assert "Traceback" not in log.read_text()


def test_check_names_models_that_do_not_match_the_settings(tmp_path: Path, run_in_process: Run) -> None:
    for name in ("apart", "zoo"):
        shutil.copytree(BUNDLES / "tiny", tmp_path / name)
    manifest = tmp_path / "zoo" / "manifest.json"
    values = json.loads(manifest.read_text()) | {"name": "zoo"}
    del values["files"]["encoder.int8.onnx"]
    manifest.write_text(json.dumps(values))
    assert "tiny (in apart): sound" in run_in_process("check", "--models", str(tmp_path)).stdout
    ended = run_in_process("check", "--models", str(tmp_path), "--variant", "int8")
    assert ended.returncode == 2
    assert [line.partition(":")[0] for line in ended.stdout.splitlines()] == ["tiny (in apart)", "zoo"]
    assert "zoo: does not match the settings: CAPSERVE_VARIANT=int8, but model zoo has only fp32" in ended.stdout


def test_check_replays_every_bundle(broken: Path, run_in_process: Run) -> None:
    sound = run_in_process("check")
    assert sound.returncode == 0
    assert re.match(r"tiny: sound: .*CPUExecutionProvider, replay within [\d.e-]+; (fp32|int8) within [\d.e-]+\n", sound.stdout)
    one_broken = run("check", "--models", str(broken))
    assert one_broken.returncode == 2
    assert "tiny (in one): sound" in one_broken.stdout
    assert "two: broken" in one_broken.stdout


def test_version_flag_prints_the_version(run_in_process: Run) -> None:
    ended = run_in_process("--version")
    assert (ended.returncode, ended.stdout) == (0, f"capserve {version('capserve')}\n")


@pytest.mark.parametrize("verb", ["check", "predict"])
def test_check_and_predict_refuse_flags_of_serve(verb: str, run_in_process: Run) -> None:
    ended = run_in_process(verb, "--port", "1", *(["7.png"] if verb == "predict" else []))
    assert ended.returncode == 2
    assert "there is no --port here" in ended.stderr


@pytest.mark.parametrize("verb", ["check", "predict"])
def test_check_and_predict_take_flags_for_models_and_device(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, object] = {"models": Path("m"), "model": "x", "variant": "int8", "device": "cpu", "threads": 3}
    taken: list[Settings] = []
    monkeypatch.setattr(commands, verb, lambda settings, **_: taken.append(settings) or 0)
    flags = [f"--{name}={value}" for name, value in {**values, "cuda-memory": 1 << 30}.items()]
    assert cli.run([verb, *flags, "--no-cuda-graphs", *(["7.png"] if verb == "predict" else [])]) == 0
    expected = {**values, "cuda_memory": 1 << 30, "cuda_graphs": False}
    assert {name: getattr(taken[0], name) for name in expected} == expected


@pytest.mark.parametrize("verb", ["check", "predict"])
def test_check_and_predict_end_quietly_when_the_pipe_closes(verb: str, tmp_path: Path, seven: bytes) -> None:
    picture = tmp_path / "7.png"
    picture.write_bytes(seven)
    files = f"{picture} " * 20 if verb == "predict" else ""  # twenty lines, none of which is read
    command = f"set -o pipefail; {sys.executable} -u -m service {verb} {files} | exec true"
    ended = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CAPSERVE_MODELS": str(BUNDLES)},
    )
    assert ended.stderr == ""
    assert ended.returncode == 128 + signal.SIGPIPE


def test_predict_answers_as_the_server_does(tmp_path: Path, client: httpx.Client, seven: bytes, run_in_process: Run) -> None:
    picture, text = tmp_path / "7.png", tmp_path / "7.txt"
    picture.write_bytes(seven)
    text.write_text("seven")
    ended = run_in_process("predict", str(picture), str(text))
    assert ended.returncode == 1
    assert "7.txt" in ended.stderr
    (line,) = ended.stdout.splitlines()
    expected = client.post("/predict?reconstruct=false", files={"file": seven}).json()
    assert json.loads(line) == {"file": str(picture), **expected}


def test_predict_reads_standard_input_and_reports_bad_files(tmp_path: Path, seven: bytes, run_in_process: Run) -> None:
    (tmp_path / "7.png").write_bytes(seven)
    environment = {**os.environ, "CAPSERVE_MODELS": str(BUNDLES)}
    piped = subprocess.run([*CAPSERVE, "predict", "-"], input=seven, capture_output=True, env=environment, check=True, timeout=60)
    assert json.loads(piped.stdout) == {**json.loads(run_in_process("predict", str(tmp_path / "7.png")).stdout), "file": "-"}
    assert run_in_process("predict", "./-").stderr == "capserve: ./-: No such file or directory\n"
    ended = run_in_process(
        "predict", "--max-body", str(len(seven) - 1), str(tmp_path), str(tmp_path / "7.png"), str(tmp_path / "8.png")
    )
    assert ended.returncode == 1
    assert [line.removeprefix(f"capserve: {tmp_path}") for line in ended.stderr.splitlines()] == [
        ": a folder; name the pictures in it",
        f"/7.png: larger than {len(seven) - 1:,} bytes; send a smaller picture, or raise CAPSERVE_MAX_BODY",
        "/8.png: No such file or directory",
    ]


@pytest.mark.parametrize("file", ["7.png", "-"])
@pytest.mark.parametrize(
    ("flag", "less", "told"),
    [("--max-body", 0, ""), ("--max-body", 1, ": larger than "), ("--max-pixels", 0, ""), ("--max-pixels", 1, "pixels")],
)
def test_predict_accepts_a_picture_at_a_limit_and_refuses_one_above(
    file: str,
    flag: str,
    less: int,
    told: str,
    tmp_path: Path,
    seven: bytes,
    run_in_process: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(seven)))
    Path("7.png").write_bytes(seven)
    most = len(seven) if flag == "--max-body" else math.prod(drawn("7").size)
    ended = run_in_process("predict", flag, str(most - less), file)
    assert (ended.returncode, ended.stdout != "", told in ended.stderr) == (less, not less, True)


def test_predict_uses_the_named_model_and_reports_a_closed_stdin(
    tmp_path: Path, seven: bytes, run_in_process: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    for name in ("apart", "zoo"):
        signed(Path(shutil.copytree(BUNDLES / "tiny", tmp_path / "models" / name)))
    (tmp_path / "7.png").write_bytes(seven)
    ended = run_in_process("predict", "--models", str(tmp_path / "models"), "--model", "zoo", "-", str(tmp_path / "7.png"))
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["model"] == "zoo"
    assert ended.stderr.startswith("capserve: -: ")


def test_predict_reports_a_picture_that_gives_no_finite_numbers(
    tmp_path: Path, seven: bytes, run_in_process: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    classify = CapsNet.classify

    def dividing(net: CapsNet, images: Array) -> tuple[Array, Array]:
        lengths, capsules = classify(net, images)
        return (lengths * np.nan if len(images) == 1 and images.any() else lengths), capsules

    monkeypatch.setattr(CapsNet, "classify", dividing)
    (tmp_path / "7.png").write_bytes(seven)
    ended = run_in_process("predict", str(tmp_path / "7.png"))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "7.png: model tiny gives no finite numbers for picture 0" in ended.stderr


def test_predict_flags_act_like_the_servers_query_parameters(tmp_path: Path, client: httpx.Client, run_in_process: Run) -> None:
    picture, grey = tmp_path / "grey.png", encoded(drawn("7", 28, ink=200, paper=40))  # normalising would change it
    picture.write_bytes(grey)
    (line,) = run_in_process("predict", "--no-normalise", "--reconstruct", "--input", str(picture)).stdout.splitlines()
    expected = client.post("/predict?normalise=none&reconstruct=true&input=true", content=grey).json()
    assert "reconstruction" in expected["objects"][0]
    assert json.loads(line) == {"file": str(picture), **expected}
    assert expected["probabilities"] != client.post("/predict", content=grey).json()["probabilities"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_large_pictures_is_given_back(tmp_path: Path) -> None:
    photograph = encoded(drawn("7", side=4_000).convert("RGB"))
    with started(tmp_path / "log") as (process, url), reaching(url, timeout=30) as client:
        before = resident(process.pid)
        for _ in range(4):
            assert client.post("/predict?reconstruct=false", files={"file": photograph}).status_code == 200
        assert before < 300 << 20
        assert resident(process.pid) < before + (60 << 20)


def resident(pid: int) -> int:
    """Returns a process's resident memory in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_check_refuses_what_serve_would(tmp_path: Path, run_in_process: Run) -> None:
    for folder in ("one", "two"):
        shutil.copytree(BUNDLES / "tiny", tmp_path / folder)
    ended = run_in_process("check", "--models", str(tmp_path))
    assert ended.returncode == 2
    assert "expected a unique name, found tiny again; change `name` in its manifest.json, or" in ended.stdout
    for ended in (run_in_process("check", "--model", "nope"), run("serve", "--model", "nope")):
        assert ended.returncode == 2
        assert f"CAPSERVE_MODEL=nope, but {BUNDLES} has only tiny" in ended.stderr
        assert "no key is set" not in ended.stderr  # by default no other machine can connect
