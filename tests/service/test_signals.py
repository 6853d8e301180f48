"""What signals do to a server, however young: real processes, real signals, real exit statuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from service.process import siblings
from tests.service.conftest import BUNDLES, reaching
from tests.service.launching import CAPSERVE, appears, launched, started


def test_sigterm_while_busy_loses_nothing_and_exits_with_0(tmp_path: Path, seven: bytes) -> None:
    with started(tmp_path / "log", "--linger", "1.5") as (process, url):
        with reaching(url) as client:
            for _ in range(5):
                assert client.post("/predict", files={"file": seven}).status_code == 200
            process.send_signal(signal.SIGTERM)
            while (state := client.get("/readyz")).status_code == 200:
                time.sleep(0.01)
            assert state.json() == {"ready": False, "state": "draining"}
            answer = client.post("/predict", files={"file": seven})
            assert (answer.status_code, answer.headers["Connection"]) == (200, "close")
        assert process.wait(10) == 0


def test_sighup_ends_a_server_run_from_a_terminal(tmp_path: Path) -> None:
    """The hangup means that the terminal was closed; elsewhere it reloads."""
    log, (ours, terminal) = tmp_path / "log", os.openpty()
    with log.open("wb") as output:
        command = [*CAPSERVE, "serve", "--port", "0", "--models", str(BUNDLES)]
        process = subprocess.Popen(command, stdin=terminal, stderr=output)
    try:
        appears(log, "ready: tiny")
        process.send_signal(signal.SIGHUP)
        assert process.wait(10) == -signal.SIGHUP
    finally:
        process.kill()
        os.close(ours)
        os.close(terminal)


def test_early_sighups_reach_the_handler_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "hangup_reloads", lambda: True)
    before, reloads = signal.getsignal(signal.SIGHUP), []
    try:
        siblings.hold_hangups()
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, lambda *_: reloads.append("reload"))
        siblings.release_hangups()
        assert reloads == ["reload"]
        siblings.release_hangups()
        assert reloads == ["reload"]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]], ids=["one process", "two workers"])
@pytest.mark.parametrize(("number", "after"), [(signal.SIGTERM, 0.3), (signal.SIGINT, 0.0)])
def test_a_server_told_to_stop_while_loading_exits_with_0(
    tmp_path: Path, flags: list[str], number: signal.Signals, after: float
) -> None:
    log = tmp_path / "log"
    with launched(log, [*CAPSERVE, "serve", "--port", "0", *flags]) as process:
        appears(log, "http://", pause=0.005)
        time.sleep(after)
        process.send_signal(number)
        assert process.wait(15) == 0
    assert "Traceback" not in log.read_text()


HANGS_WHEN_WARMED = """
import sys
from service.__main__ import main
from service.engine import CapsNet
def warm_up(net, most):
    from service.bundle import IMAGES, LENGTHS
    import numpy as np, onnxruntime as ort
    long = np.zeros((20_000, *net.manifest.image_shape), np.float32)  # for minutes in the runtime itself
    session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    while True:
        session.run([LENGTHS.name], {IMAGES.name: long})
CapsNet.warm_up = warm_up
sys.exit(main(["serve", "--port", "0", "--linger", "0"]))
"""


def test_a_server_told_to_stop_while_its_runtime_hangs_exits_with_0(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with launched(log, [sys.executable, "-c", HANGS_WHEN_WARMED, str(BUNDLES / "tiny" / "encoder.onnx")]) as process:
        appears(log, "http://")
        with reaching(re.findall(r"http://[\d.:]+", log.read_text())[0]) as client:
            until = time.monotonic() + 20
            while time.monotonic() < until:
                with suppress(httpx.TransportError):
                    assert client.get("/readyz").json()["state"] == "warming"
                    break
                time.sleep(0.05)
            else:
                pytest.fail(log.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert "Traceback" not in log.read_text()


def test_a_second_ctrl_c_does_not_wait_for_open_requests(tmp_path: Path) -> None:
    with started(tmp_path / "log", "--linger", "0", "--drain", "60") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 9\r\n\r\n"
            )
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert process.poll() is None  # it waits for that request
            process.send_signal(signal.SIGINT)
            assert process.wait(5) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_sigterm_twice_still_loses_nothing(tmp_path: Path, seven: bytes) -> None:
    """As from a supervisor that is told to stop twice; only a second Ctrl-C means a hurry.

    A connection without a request does not keep the server from ending.
    """
    with started(tmp_path / "log", "--linger", "0", "--drain", "20") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        address = host, int(port)
        with socket.create_connection(address), socket.create_connection(address, timeout=10) as connection:
            head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(seven)}\r\n\r\n"
            connection.sendall(head.encode() + seven[:10])
            for _ in range(2):
                time.sleep(0.3)
                process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            connection.sendall(seven[10:])
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            assert process.wait(10) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_sighup_while_loading_reloads_when_the_server_is_ready(tmp_path: Path, workers: int) -> None:
    """A process that is too young to reload must not die of the signal, and neither must its workers.

    Nor may they where standard input, by which a terminal is recognised, is closed.
    """
    log = tmp_path / "log"
    command = f"exec {sys.executable} -m service serve --port 0 --linger 0 --workers {workers} <&-"
    with launched(log, ["bash", "-c", command]) as process:
        appears(log, "http://")
        loading = True
        while loading:  # told once at least, however fast it loads
            loading = "ready: tiny" not in log.read_text()
            if process.poll() is None:
                process.send_signal(signal.SIGHUP)
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        appears(log, "ready: tiny", workers)
        appears(log, "reloaded: tiny unchanged", workers)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert not re.search("died|Traceback", log.read_text())


def test_many_sighups_are_merged_into_a_few_reloads(tmp_path: Path) -> None:
    """SIGUSR1, with which a worker asks its supervisor to have all reload, does not end a server without workers."""
    log, told = tmp_path / "log", "reloaded: tiny unchanged"
    with started(log) as (process, _):
        process.send_signal(signal.SIGUSR1)
        for _ in range(200):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.001)  # else the kernel merges them
        appears(log, told)
        before = log.read_text().count(told)
        time.sleep(1.5)  # time enough for ten
        assert log.read_text().count(told) < before + 5
