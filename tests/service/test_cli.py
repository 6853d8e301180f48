"""The command line as people and orchestrators use it: real processes, real signals, real exit statuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.service.conftest import BUNDLES, drawn, encoded, wait_until_ready
from tests.service.test_metrics import samples

CAPSERVE = [sys.executable, "-m", "service"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CAPSERVE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CAPSERVE_MODELS": str(BUNDLES), **environment},
    )


@contextmanager
def started(log: Path, *flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`capserve serve` on a free port; gives the process and its URL."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*CAPSERVE, "serve", "--port", "0", *flags],
            stderr=output,
            env={**os.environ, "CAPSERVE_MODELS": str(BUNDLES), **environment},
        )
        try:
            until = time.monotonic() + 20
            while not (found := re.search(r"http://[\d.:]+", log.read_text())):
                assert process.poll() is None and time.monotonic() < until, log.read_text()  # noqa: PT018
                time.sleep(0.02)
            with httpx.Client(base_url=found[0]) as client:
                wait_until_ready(client, 40)
            yield process, found[0]
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder of bundles, one with a flipped byte."""
    for name in ("one", "two"):
        shutil.copytree(BUNDLES / "tiny", tmp_path / "models" / name)
    graph = tmp_path / "models" / "two" / "encoder.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    return tmp_path / "models"


def test_sigterm_while_busy_loses_nothing_and_exits_with_0(tmp_path: Path, seven: bytes) -> None:
    with started(tmp_path / "log", "--linger", "0.3") as (process, url):
        with httpx.Client(base_url=url) as client:
            for _ in range(5):
                assert client.post("/predict", files={"file": seven}).status_code == 200
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            answer = client.post("/predict", files={"file": seven})
            assert (answer.status_code, answer.headers["Connection"]) == (200, "close")
            assert client.get("/readyz").json() == {"ready": False, "state": "draining"}
        assert process.wait(10) == 0


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]], ids=["one", "two workers"])
def test_a_corrupt_bundle_does_not_start_and_says_why(broken: Path, flags: list[str]) -> None:
    ended = run("serve", "--port", "0", *flags, CAPSERVE_MODELS=str(broken))
    assert ended.returncode == 2
    assert "sha256 of" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_cuda_without_a_gpu_does_not_start_and_says_what_is_missing() -> None:
    ended = run("serve", "--port", "0", CAPSERVE_DEVICE="cuda")
    assert ended.returncode == 2
    assert "CUDA" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (["--models", "/nonexistent"], {}, "expected a folder of bundles"),
        (["--model", "huge"], {}, "has only tiny"),
        (["--max-batch", "0"], {}, "CAPSERVE_MAX_BATCH: Input should be greater than or equal to 1"),
        ([], {"CAPSERVE_DEVICE": "tpu"}, "CAPSERVE_DEVICE: Input should be 'auto', 'cpu' or 'cuda'"),
        (["--host", "203.0.113.1"], {}, "cannot listen on 203.0.113.1"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(arguments: list[str], environment: dict[str, str], told: str) -> None:
    ended = run("serve", *arguments, **environment)
    assert ended.returncode == 2
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_onnxruntime_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ModuleNotFoundError(name='onnxruntime')")
    ended = run("check", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    assert "pip install 'capserve[cpu]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_check_replays_every_bundle(broken: Path) -> None:
    sound = run("check")
    assert sound.returncode == 0
    assert re.match(r"tiny: sound: .*CPUExecutionProvider", sound.stdout)
    one_broken = run("check", "--models", str(broken))
    assert one_broken.returncode == 2
    assert "one: sound" in one_broken.stdout
    assert "two: broken" in one_broken.stdout


def test_predict_answers_as_the_server_does(tmp_path: Path, client: httpx.Client, seven: bytes) -> None:
    picture, text = tmp_path / "7.png", tmp_path / "7.txt"
    picture.write_bytes(seven)
    text.write_text("seven")
    ended = run("predict", str(picture), str(text))
    assert ended.returncode == 1
    assert "7.txt" in ended.stderr
    (line,) = ended.stdout.splitlines()
    expected = client.post("/predict?reconstruct=false", files={"file": seven}).json()
    assert json.loads(line) == {"file": str(picture), **expected}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_large_pictures_is_given_back(tmp_path: Path) -> None:
    photograph = encoded(drawn("7", side=4_000).convert("RGB"))
    with started(tmp_path / "log") as (process, url), httpx.Client(base_url=url, timeout=30) as client:
        before = resident(process.pid)
        for _ in range(4):
            assert client.post("/predict?reconstruct=false", files={"file": photograph}).status_code == 200
        assert before < 300 << 20
        assert resident(process.pid) < before + (60 << 20)


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_workers_share_the_port_and_their_metrics_add_up(tmp_path: Path) -> None:
    ones = encoded(drawn("1"))
    with started(tmp_path / "log", "--workers", "2", "--log-format", "json", "--linger", "0") as (process, url):
        for _ in range(40):  # a connection each, so that both are met
            assert httpx.post(f"{url}/predict", files={"file": ones}).status_code == 200
        with httpx.Client(base_url=url) as client:
            for _ in range(3):
                seen = samples(client)
                assert seen["capserve_predictions_total", "1", "tiny"] == 40
                assert seen["capserve_ready",] == 1
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        servers = [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        assert len(servers) == 2
        os.kill(servers[0], signal.SIGKILL)
        until = time.monotonic() + 20
        while (tmp_path / "log").read_text().count('"ready: tiny') < 3:
            assert time.monotonic() < until
            time.sleep(0.1)
        with httpx.Client(base_url=url) as client:
            assert samples(client)["capserve_predictions_total", "1", "tiny"] == 40  # the dead one's count is kept
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    for line in (tmp_path / "log").read_text().splitlines():
        json.loads(line)


def test_check_refuses_what_serve_would(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        shutil.copytree(BUNDLES / "tiny", tmp_path / folder)
    for verb in ("check", "serve"):
        done = run(verb, CAPSERVE_MODELS=str(tmp_path), CAPSERVE_PORT="0")
        assert done.returncode == 2
        assert "expected a name of its own, found tiny again" in done.stdout + done.stderr
        done = run(verb, "--model", "nope", CAPSERVE_PORT="0")
        assert done.returncode == 2
        assert "CAPSERVE_MODEL=nope" in done.stderr


def test_workers_whose_supervisor_was_killed_stop_by_themselves(tmp_path: Path) -> None:
    with started(tmp_path / "log", "--workers", "2") as (process, url):
        process.kill()
        process.wait()
        until = time.monotonic() + 15
        with httpx.Client(base_url=url) as client:
            while time.monotonic() < until:
                try:
                    client.get("/healthz")
                except httpx.TransportError:
                    return
                time.sleep(0.1)
    pytest.fail("the workers answer on, though nobody looks after them")
