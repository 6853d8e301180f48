"""The command line as people and orchestrators use it: real processes, real signals, real exit statuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from tests.service.bundles import external
from tests.service.conftest import BUNDLES, drawn, encoded, reaching, wait_until_ready
from tests.service.test_metrics import samples
from tests.waiting import until

CAPSERVE = [sys.executable, "-m", "service"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CAPSERVE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CAPSERVE_MODELS": str(BUNDLES), "CAPSERVE_PORT": "0", **environment},
    )


@contextmanager
def launched(log: Path, command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server of tests/bundles from its very first moment, its words in `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # from a terminal a hangup is to end it
            stderr=output,
            env={**os.environ, "CAPSERVE_MODELS": str(BUNDLES), **environment},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextmanager
def started(log: Path, *flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`capserve serve` on a free port, once it is ready; gives the process and its URL."""
    with launched(log, [*CAPSERVE, "serve", "--port", "0", *flags], **environment) as process:
        until = time.monotonic() + 20
        while not (found := re.search(r"http://[\d.:]+", log.read_text())):
            assert process.poll() is None and time.monotonic() < until, log.read_text()  # noqa: PT018
            time.sleep(0.02)
        with reaching(found[0]) as client:
            wait_until_ready(client, 40)
        yield process, found[0]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder of bundles, one with a flipped byte."""
    for name in ("one", "two"):
        shutil.copytree(BUNDLES / "tiny", tmp_path / "models" / name)
    graph = tmp_path / "models" / "two" / "encoder.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    return tmp_path / "models"


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


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]], ids=["one", "two workers"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after", [0.0, 0.3])
def test_told_to_stop_while_it_loads_it_exits_with_0(
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


def test_told_to_stop_while_a_runtime_hangs_it_exits_with_0(tmp_path: Path) -> None:
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


def test_ctrl_c_twice_does_not_wait_for_whoever_does_not_let_go(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]], ids=["one", "two workers"])
def test_told_to_reload_while_it_loads_it_does_so_when_it_serves(tmp_path: Path, flags: list[str]) -> None:
    """A process that is so young that it cannot must not die of it, and neither must one of its workers."""
    log = tmp_path / "log"
    with launched(log, [*CAPSERVE, "serve", "--port", "0", "--linger", "0", *flags]) as process:
        appears(log, "http://")
        while "ready: tiny" not in log.read_text():
            if process.poll() is None:
                process.send_signal(signal.SIGHUP)
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        appears(log, "ready: tiny", len(flags) or 1)
        appears(log, "reloaded: tiny unchanged", len(flags) or 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert "died" not in log.read_text()


@pytest.mark.parametrize("flags", ["", "--workers 2"], ids=["one", "two workers"])
def test_without_standard_input_it_serves(tmp_path: Path, flags: str) -> None:
    log = tmp_path / "log"
    command = f"exec {sys.executable} -m service serve --port 0 --linger 0 {flags} <&-"
    with launched(log, ["bash", "-c", command]) as process:
        appears(log, "ready: tiny", 2 if flags else 1)
        process.send_signal(signal.SIGHUP)
        appears(log, "reloaded: tiny unchanged", 2 if flags else 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert "Traceback" not in log.read_text()


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
        (["--models", "/nonexistent"], {}, "expected a folder of bundles, found No such file or directory; name another"),
        (["--models", str(BUNDLES / "tiny")], {}, "expected a folder of bundles, found none in it; name another"),
        (["--models", "/dev/null"], {}, "expected a folder of bundles, found Not a directory; name another"),
        (["--model", "huge"], {}, "has only tiny"),
        (["--max-batch", "0"], {}, "CAPSERVE_MAX_BATCH: expected a whole number of at least 1, found 0"),
        ([], {"CAPSERVE_DEVICE": "tpu"}, "CAPSERVE_DEVICE: expected auto or cpu or cuda, found tpu"),
        (
            [],
            {"CAPSERVE_TRACES": "nonsense"},
            "CAPSERVE_TRACES: expected a URL such as http://collector:4318/v1/traces, found nonsense",
        ),
        ([], {"CAPSERVE_TRACES": "collector:4318"}, "CAPSERVE_TRACES: expected a URL"),
        ([], {"CAPSERVE_TRACES": "http://:4318"}, "CAPSERVE_TRACES: expected a URL"),
        (["--host", "203.0.113.1"], {}, "choose another with CAPSERVE_HOST or CAPSERVE_PORT"),
        (["--host", "a..b"], {}, "cannot listen on a..b"),
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


def test_it_says_which_version_it_is() -> None:
    ended = run("--version")
    assert (ended.returncode, ended.stdout) == (0, f"capserve {version('capserve')}\n")


@pytest.mark.parametrize("verb", ["check", "predict"])
def test_flags_of_serve_are_refused_where_they_mean_nothing(verb: str) -> None:
    ended = run(verb, "--port", "1", *(["7.png"] if verb == "predict" else []))
    assert ended.returncode == 2
    assert "unrecognized arguments: --port" in ended.stderr


@pytest.mark.parametrize("verb", ["check", "predict"])
def test_a_reader_that_has_seen_enough_is_no_fault(verb: str, tmp_path: Path, seven: bytes) -> None:
    picture = tmp_path / "7.png"
    picture.write_bytes(seven)
    files = f"{picture} " * 20 if verb == "predict" else ""  # more than a pipe's buffer is asked to hold at once
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


def test_a_graph_with_weights_in_another_file_is_refused(tmp_path: Path) -> None:
    folder = external(tmp_path / "models" / "tiny")
    for verb, output in (("check", "stdout"), ("serve", "stderr")):
        ended = run(verb, CAPSERVE_MODELS=str(folder.parent), CAPSERVE_PORT="0")
        assert ended.returncode == 2
        assert "encoder.onnx: expected all weights in this file, found some in another" in getattr(ended, output)


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


def test_predicts_flags_are_the_servers_parameters(tmp_path: Path, client: httpx.Client) -> None:
    picture, grey = tmp_path / "grey.png", encoded(drawn("7", 28, ink=200, paper=40))  # normalised it would be another
    picture.write_bytes(grey)
    (line,) = run("predict", "--no-normalise", "--reconstruct", str(picture)).stdout.splitlines()
    expected = client.post("/predict?normalise=none&reconstruct=true", content=grey).json()
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
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_workers_share_the_port_and_their_metrics_add_up(tmp_path: Path) -> None:
    ones = encoded(drawn("1"))
    flags = ["--workers", "2", "--log-format", "json", "--linger", "0"]
    with started(tmp_path / "log", *flags, TMPDIR=str(tmp_path)) as (process, url):
        appears(tmp_path / "log", '"ready: tiny', 2)
        for _ in range(40):  # a connection each, so that both are met
            with reaching(url) as client:
                assert client.post("/predict", files={"file": ones}).status_code == 200
        with reaching(url) as client:
            for _ in range(3):
                seen = samples(client)
                assert seen["capserve_predictions_total", "1", "tiny"] == 40
                assert seen["capserve_ready",] == 1
                assert seen["capserve_workers",] == seen["capserve_workers_wanted",] == 2
                assert seen["capserve_reference_winner_length_count", "tiny"] == pytest.approx(1, abs=1e-3)
        servers = workers_of(process)
        assert len(servers) == 2
        (files,) = tmp_path.glob("capserve-metrics-*")
        before = sorted(path.name for path in files.iterdir())
        os.kill(servers[0], signal.SIGKILL)
        appears(tmp_path / "log", '"ready: tiny', 3)
        with reaching(url) as client:
            assert samples(client)["capserve_predictions_total", "1", "tiny"] == 40  # the dead one's count is kept
        assert sorted(path.name for path in files.iterdir()) == before  # in the same place: not a file more for each that dies
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    for line in (tmp_path / "log").read_text().splitlines():
        json.loads(line)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def appears(log: Path, words: str, times: int = 1, seconds: float = 20, pause: float = 0.05) -> None:
    until(lambda: log.read_text().count(words) >= times, seconds, pause, said=log.read_text)


def test_a_worker_that_cannot_come_back_takes_no_other_with_it(tmp_path: Path) -> None:
    """Its folder was spoilt while it ran; it is tried again, ever more seldom, until the folder is sound."""
    shutil.copytree(BUNDLES, tmp_path / "models")
    graph, log = tmp_path / "models" / "tiny" / "encoder.onnx", tmp_path / "log"
    sound = graph.read_bytes()
    with started(log, "--workers", "2", "--linger", "0", CAPSERVE_MODELS=str(tmp_path / "models")) as (process, url):
        appears(log, "ready: tiny", 2)
        graph.write_bytes(b"no graph")
        os.kill(workers_of(process)[0], signal.SIGKILL)
        appears(log, "died with status 2; another in 2 s")
        assert process.poll() is None
        with reaching(url) as client:
            assert client.get("/readyz").status_code == 200
            assert (samples(client)["capserve_workers",], samples(client)["capserve_workers_wanted",]) == (1, 2)
        graph.write_bytes(sound)
        appears(log, "ready: tiny", 3)
        with reaching(url) as client:
            assert samples(client)["capserve_workers",] == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


FAILS_WHERE_TOLD = """
import os, sys
from pathlib import Path
from service.__main__ import main
from service.engine import CapsNet
classify = CapsNet.classify
def fails_where_told(net, images):
    if Path(sys.argv[-1]).read_text() == str(os.getpid()):
        raise RuntimeError("out of order")
    return classify(net, images)
CapsNet.classify = fails_where_told
if __name__ == "__main__":
    sys.exit(main(["serve", "--port", "0", "--workers", "2", "--linger", "0"]))
"""


def test_a_worker_whose_model_fails_again_and_again_is_replaced(tmp_path: Path) -> None:
    """Nobody outside could: whoever asks for /healthz meets either of the two."""
    log, told, script = tmp_path / "log", tmp_path / "told", tmp_path / "server.py"
    told.write_text("")
    script.write_text(FAILS_WHERE_TOLD)
    command = [sys.executable, str(script), str(told)]
    with launched(log, command) as process:
        appears(log, "ready: tiny", 2)
        url = re.findall(r"http://[\d.:]+", log.read_text())[0]
        failing = workers_of(process)[0]
        told.write_text(str(failing))
        while "failed, 1 in a row" not in log.read_text():
            with reaching(url) as client:  # a connection each, so that either worker may get it
                assert client.post("/predict", files={"file": encoded(drawn("7"))}).status_code in (200, 503)
        appears(log, f"worker {failing} died with status 4; another in 0.5 s")
        appears(log, "ready: tiny", 3)
        with reaching(url) as client:
            assert samples(client)["capserve_workers",] == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert "Traceback" not in log.read_text()


def test_a_worker_that_cannot_start_leaves_no_metrics_behind(tmp_path: Path) -> None:
    """It would be tried again and again, and each try's files read at every scrape."""
    code = (
        "from service.app import create_app; from service.errors import StartError; from service.settings import Settings\n"
        "try: create_app(Settings(model='nope'))\n"
        "except StartError as error: print(error)"
    )
    environment = {**os.environ, "CAPSERVE_MODELS": str(BUNDLES), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "CAPSERVE_MODEL=nope" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_check_refuses_what_serve_would(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        shutil.copytree(BUNDLES / "tiny", tmp_path / folder)
    for verb in ("check", "serve"):
        done = run(verb, CAPSERVE_MODELS=str(tmp_path))
        assert done.returncode == 2
        assert "expected a name of its own, found tiny again" in done.stdout + done.stderr
        done = run(verb, "--model", "nope")
        assert done.returncode == 2
        assert "CAPSERVE_MODEL=nope" in done.stderr


def test_workers_whose_supervisor_was_killed_stop_by_themselves(tmp_path: Path) -> None:
    with started(tmp_path / "log", "--workers", "2") as (process, url):
        process.kill()
        process.wait()
        until = time.monotonic() + 15
        with reaching(url) as client:
            while time.monotonic() < until:
                try:
                    client.get("/healthz")
                except httpx.TransportError:
                    return
                time.sleep(0.1)
    pytest.fail("the workers answer on, though nobody looks after them")
