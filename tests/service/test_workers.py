"""Several processes on one port: their metrics, their deaths, and who takes their places."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from service.errors import StartError
from service.process import tallies, workers
from service.process.workers import CANNOT_START, _Supervisor, _Worker
from tests.service.conftest import BUNDLES, drawn, encoded, reaching, settings, wait_until_ready
from tests.service.launching import CAPSERVE, appears, launched, started, workers_of
from tests.service.processes import ROOT, free_port
from tests.service.test_metrics import samples
from tests.waiting import until


def test_workers_share_the_port_and_their_metrics_add_up(tmp_path: Path) -> None:
    ones = encoded(drawn("1"))
    flags = ["--workers", "2", "--log-format", "json", "--linger", "0"]
    with started(tmp_path / "log", *flags, TMPDIR=str(tmp_path)) as (process, url):
        appears(tmp_path / "log", '"ready: tiny', 2)
        for _ in range(40):  # on separate connections, so that both are met
            with reaching(url) as client:
                assert client.post("/predict", files={"file": ones}).status_code == 200
        with reaching(url) as client:
            for _ in range(3):
                seen = samples(client)
                assert seen["capserve_predictions_total", "1", "tiny"] == 40
                assert seen["capserve_ready",] == 1
                assert seen["capserve_workers",] == seen["capserve_workers_wanted",] == 2
                assert seen["capserve_reference_winner_length_count", "tiny"] == pytest.approx(1, abs=1e-3)
                began = seen["process_start_time_seconds",]
        servers = workers_of(process)
        assert len(servers) == 2
        (files,) = tmp_path.glob("capserve-metrics-*")
        before = sorted(path.name for path in files.iterdir())
        # All their blocks are allocated, or writing to them on a full disk would end a process without a word.
        assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in files.iterdir())
        assert {path.stat().st_size for path in files.iterdir()} == set(tallies.SIZES.values())  # the space they have was enough
        os.kill(servers[0], signal.SIGKILL)
        appears(tmp_path / "log", '"ready: tiny', 3)
        with reaching(url) as client:
            seen = samples(client)
            assert seen["capserve_predictions_total", "1", "tiny"] == 40  # the dead one's count is kept
            assert began < seen["process_start_time_seconds",] < time.time()  # and its replacement's start is reported
        assert sorted(path.name for path in files.iterdir()) == before  # in the same place: a worker that dies adds no files
        assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in files.iterdir())
        shutil.rmtree(files)  # as something that tidies up may do
        with reaching(url) as client:
            assert client.get("/healthz").status_code == 200
            refused = client.get("/metrics")
            assert refused.status_code == 503
            assert "the folder of the workers' metrics was removed" in refused.json()["detail"]
        os.kill(workers_of(process)[0], signal.SIGKILL)
        appears(tmp_path / "log", f"the folder of the workers' metrics, {files}, was removed: restart the server", 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {process.pid, *servers} < {each["process"] for each in told}  # and the one that came later


def test_a_worker_that_cannot_restart_does_not_stop_the_others(tmp_path: Path) -> None:
    """Its bundle was damaged while it ran; it is tried again, at growing intervals, until the bundle is sound."""
    shutil.copytree(BUNDLES, tmp_path / "models")
    graph, log = tmp_path / "models" / "tiny" / "encoder.onnx", tmp_path / "log"
    sound = graph.read_bytes()
    with started(log, "--workers", "2", "--linger", "0", CAPSERVE_MODELS=str(tmp_path / "models")) as (process, url):
        appears(log, "ready: tiny", 2)
        graph.write_bytes(b"no graph")
        os.kill(workers_of(process)[0], signal.SIGKILL)
        appears(log, "died with status 2; another in 1 s")
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
    """Nobody outside could tell which one fails: /healthz is answered by either of the two."""
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
            with reaching(url) as client:  # on separate connections, so that either worker may get it
                assert client.post("/predict", files={"file": encoded(drawn("7"))}).status_code in (200, 503)
        appears(log, f"worker {failing} died with status 4; another in 0.5 s")
        appears(log, "ready: tiny", 3)
        with reaching(url) as client:
            assert samples(client)["capserve_workers",] == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a disk that is always full")
def test_a_worker_is_replaced_without_a_writable_log_or_start_folder(tmp_path: Path) -> None:
    """As when the disk is full or the log's reader has ended, and when the folder of a release was cleaned up."""
    (release := tmp_path / "release").mkdir()
    (release / "models").symlink_to(BUNDLES)
    port = free_port()
    command = [*CAPSERVE, "serve", "--port", str(port), "--workers", "2", "--linger", "0", "--models", "models"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONUNBUFFERED", "CAPSERVE_MODELS")}
    environment["PYTHONPATH"] = str(ROOT)
    with open("/dev/full", "wb") as full, subprocess.Popen(command, cwd=release, stderr=full, env=environment) as process:
        try:
            with reaching(f"http://127.0.0.1:{port}") as client:
                wait_until_ready(client, 40)
                until(lambda: samples(client)["capserve_workers",] == 2, 40)
            release.rename(tmp_path / "old")
            (tmp_path / "old" / "models").unlink()
            (tmp_path / "old").rmdir()
            release.mkdir()  # another, at the same place
            (release / "models").symlink_to(BUNDLES)
            killed = workers_of(process)[0]
            os.kill(killed, signal.SIGKILL)
            until(lambda: len(workers := workers_of(process)) == 2 and killed not in workers, 30)
            with reaching(f"http://127.0.0.1:{port}") as client:
                until(lambda: samples(client)["capserve_workers",] == 2, 30)
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0
        finally:
            process.kill()


IMPATIENT = """
import sys
from service.__main__ import main
from service.process import workers
workers.STILL = 3.0
if __name__ == "__main__":
    sys.exit(main(["serve", "--port", "0", "--workers", "2", "--linger", "0", "--drain", "8"]))
"""


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two workers that are ready, and a supervisor that waits only three seconds for a sign of life of theirs."""
    script = tmp_path / "server.py"
    script.write_text(IMPATIENT)
    with launched(tmp_path / "log", [sys.executable, str(script)]) as process:
        appears(tmp_path / "log", "ready: tiny", 2)
        time.sleep(0.5)  # they listen, and beat, a moment later
        yield process


def test_a_worker_that_stands_still_is_replaced(impatient: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Half of all new connections would wait for it."""
    log, (still, other) = tmp_path / "log", workers_of(impatient)
    os.kill(still, signal.SIGSTOP)
    appears(log, f"worker {still} has stood still for 3 s and is killed")
    appears(log, f"worker {still} died with status -9; another in 0.5 s")
    appears(log, "ready: tiny", 3)
    assert other in workers_of(impatient)
    impatient.send_signal(signal.SIGTERM)
    assert impatient.wait(15) == 0
    assert f" {other} - told to stop" in log.read_text()


def test_a_stop_does_not_wait_for_a_worker_that_stands_still(tmp_path: Path) -> None:
    with started(tmp_path / "log", "--workers", "2", "--linger", "0") as (process, _):
        appears(tmp_path / "log", "ready: tiny", 2)
        time.sleep(0.5)
        os.kill(workers_of(process)[0], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 1  # since one did not stop by itself
    assert "has stood still for 5 s and is killed" in (tmp_path / "log").read_text()


class Loading:
    """Stands for a worker's process, which takes a moment to end when it is terminated."""

    pid = 7

    def __init__(self) -> None:
        self.sentinel, self._ended = os.pipe()
        self.exitcode: int | None = None

    def terminate(self) -> None:
        threading.Timer(0.5, self._ends, [-signal.SIGTERM]).start()

    def kill(self) -> None:
        self._ends(-signal.SIGKILL)

    def _ends(self, status: int) -> None:
        self.exitcode = status
        os.close(self._ended)

    def is_alive(self) -> bool:
        return self.exitcode is None


@pytest.fixture
def supervisor() -> _Supervisor:
    return _Supervisor(settings(workers=2), lambda *_: None, ("127.0.0.1", 0), ExitStack())


def test_a_stop_lets_workers_end_that_have_been_loading_for_long(supervisor: _Supervisor) -> None:
    process = Loading()
    supervisor._workers = [_Worker(0, process, time.monotonic(), 0, still=1_000)]  # type: ignore[arg-type]
    assert supervisor._end() == 0
    assert process.exitcode == -signal.SIGTERM


def test_a_stop_kills_a_worker_that_stands_still_before_it_listens(
    supervisor: _Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "STILL_AT_END", 0.4)
    monkeypatch.setattr(Loading, "terminate", lambda _: None)
    process = Loading()
    supervisor._workers = [_Worker(0, process, time.monotonic(), 0)]  # type: ignore[arg-type]
    assert supervisor._end() == 1  # since one did not stop by itself
    assert process.exitcode == -signal.SIGKILL
    assert "worker 7 has stood still for 0.4 s and is killed" in caplog.text


def test_a_worker_loading_several_times_longer_than_others_is_killed(supervisor: _Supervisor) -> None:
    """On a cold disk all take long to load, and the first to listen shows how long."""
    first, second = Loading(), Loading()
    minutes = round(600 / workers.LOOK)  # ten
    supervisor._workers = [_Worker(place, each, 0.0, 0) for place, each in enumerate((first, second))]  # type: ignore[arg-type]
    for _ in range(minutes):
        supervisor._kill_the_still()
    supervisor._beats[0] += 1
    supervisor._kill_the_still()
    assert second.is_alive()
    for _ in range(3 * minutes):
        supervisor._beats[0] += 1
        supervisor._kill_the_still()
    assert (first.exitcode, second.exitcode) == (None, -signal.SIGKILL)


def test_workers_paused_together_with_their_supervisor_live_on(impatient: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """As in a container that is paused."""
    everyone = [impatient.pid, *workers_of(impatient)]
    for each in everyone:
        os.kill(each, signal.SIGSTOP)
    time.sleep(3.5)
    for each in everyone:  # the supervisor first: it looks before they beat
        os.kill(each, signal.SIGCONT)
    time.sleep(1.5)
    assert [impatient.pid, *workers_of(impatient)] == everyone
    assert "stood still" not in (tmp_path / "log").read_text()


def test_a_worker_that_drains_slowly_is_not_killed(impatient: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """It drains a request whose body comes slowly, for longer than a worker may stand still."""
    url = re.findall(r"http://[\d.:]+", (tmp_path / "log").read_text())[0]
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\n")
        time.sleep(0.5)
        for each in workers_of(impatient):
            os.kill(each, signal.SIGTERM)
        time.sleep(4)
        slow.sendall(bytes(100))
        assert slow.recv(100).startswith(b"HTTP/1.1 415")
    assert "stood still" not in (tmp_path / "log").read_text()


NO_PROCESS_WHERE_TOLD = """
import errno, os, sys
from multiprocessing import util
from pathlib import Path
from service.__main__ import main
start = util.spawnv_passfds
begun = []
def start_unless_told(*command):
    if Path(sys.argv[1]).exists() or len(begun) == int(sys.argv[3]):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    begun.append(command)
    return start(*command)
util.spawnv_passfds = start_unless_told
if __name__ == "__main__":
    sys.exit(main(["serve", "--port", "0", "--workers", sys.argv[2], "--linger", "0"]))
"""


def test_workers_serve_on_while_no_new_process_can_be_started(tmp_path: Path) -> None:
    log, told, script = tmp_path / "log", tmp_path / "told", tmp_path / "server.py"
    script.write_text(NO_PROCESS_WHERE_TOLD)
    with launched(log, [sys.executable, str(script), str(told), "2", "-1"]) as process:
        appears(log, "ready: tiny", 2)
        url = re.findall(r"http://[\d.:]+", log.read_text())[0]
        told.touch()
        os.kill(workers_of(process)[0], signal.SIGKILL)
        appears(log, "no worker can be started (Resource temporarily unavailable); another in 1 s")
        with reaching(url) as client:
            assert samples(client)["capserve_workers",] == 1
        told.unlink()
        appears(log, "ready: tiny", 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert "Traceback" not in log.read_text()


def test_the_server_gives_up_if_no_process_can_be_started(tmp_path: Path) -> None:
    told, script = tmp_path / "told", tmp_path / "server.py"
    script.write_text(NO_PROCESS_WHERE_TOLD)
    told.touch()
    command = [sys.executable, str(script), str(told), "8", "-1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == CANNOT_START
    *tried, last = ended.stderr.splitlines()
    assert [line.partition("another in ")[2] for line in tried if "another in " in line] == ["0.5 s", "1 s", "2 s", "4 s"]
    assert last.endswith("(Resource temporarily unavailable), as all did: giving up")


def test_the_server_runs_with_fewer_workers_if_no_more_can_be_started(tmp_path: Path) -> None:
    log, script = tmp_path / "log", tmp_path / "server.py"
    script.write_text(NO_PROCESS_WHERE_TOLD)
    tracker = 1  # multiprocessing's own process, the first
    with launched(log, [sys.executable, str(script), str(tmp_path / "told"), "8", str(tracker + 2)]) as process:
        appears(log, "ready: tiny", 2)
        appears(log, "no worker can be started", 3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


def test_workers_that_never_listen_are_given_up(tmp_path: Path) -> None:
    """Whatever they die of, whoever runs the service must hear of it."""
    script = tmp_path / "server.py"
    script.write_text(
        "import os, sys\n"
        "if __name__ == '__main__':\n"
        "    from service.__main__ import main\n"
        "    sys.exit(main(['serve', '--port', '0', '--workers', '2']))\n"
        "os._exit(9)\n"  # in a worker, which imports this before its work
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == CANNOT_START
    assert ended.stderr.splitlines()[-1].endswith("died with status 9, as all did: giving up")


def test_workers_do_not_start_without_disk_space_for_their_metrics(tmp_path: Path) -> None:
    most = min(tallies.SIZES.values())
    ended = subprocess.run(
        [sys.executable, "-m", "service", "serve", "--port", "0", "--workers", "2"],
        env={**os.environ, "CAPSERVE_MODELS": str(BUNDLES), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )
    assert ended.returncode == CANNOT_START
    assert re.search(r"\(File too large, for [\d,]+ bytes of metrics in /.+\), as all did: giving up$", ended.stderr)
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_worker_without_room_for_metrics_leaves_no_partial_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With an empty file among them, nobody could read any."""
    monkeypatch.setenv(tallies.FOLDER_VARIABLE, str(tmp_path))
    tallies.create_files(0)
    write = Path.write_bytes

    def fill(path: Path, data: bytes) -> int:
        write(path, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(OSError, match=r"No space left on device, for [\d,]+ bytes of metrics in "):
        tallies.create_files(1)
    assert not list(tmp_path.glob("*_1.db"))
    monkeypatch.undo()
    monkeypatch.setenv(tallies.FOLDER_VARIABLE, str(tmp_path))
    tallies.create_files(1)
    assert {path.name: path.stat().st_size for path in tmp_path.glob("*_1.db")} == {
        f"{kind}_1.db": size for kind, size in tallies.SIZES.items()
    }


def test_a_missing_temporary_folder_raises_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(StartError, match=r"temporary folder: No such file or directory; .* TMPDIR"), tallies.folder():
        pass


def test_unwritable_shared_memory_is_reported_at_start() -> None:
    inside = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "bash",
        "-c",
        'mount -t tmpfs -o ro none /dev/shm && exec "$@"',
        "-",
    ]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this sandbox lets nobody mount anything")
    ended = subprocess.run(
        [*inside, *CAPSERVE, "serve", "--port", "0", "--workers", "2"],
        env={**os.environ, "CAPSERVE_MODELS": str(BUNDLES)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == CANNOT_START
    assert "in /dev/shm: Read-only file system; make it writable, or use one worker" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_the_metrics_folder_is_locked_against_removal_of_old_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(tallies.FOLDER_VARIABLE, "")
    with tallies.folder():
        found = os.open(os.environ[tallies.FOLDER_VARIABLE], os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # as systemd-tmpfiles tries
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(found)


def test_a_start_removes_only_the_metrics_of_a_killed_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(tallies.FOLDER_VARIABLE, "")
    with tallies.folder():
        at_work = Path(os.environ[tallies.FOLDER_VARIABLE])
        left, others = tmp_path / f"{tallies.PREFIX}left", tmp_path / "others"
        linked, fresh = tmp_path / f"{tallies.PREFIX}linked", tmp_path / f"{tallies.PREFIX}fresh"
        for each in (left, others, fresh):
            each.mkdir()
            (each / "counter_0.db").write_bytes(bytes(8))
        linked.symlink_to(others)
        for each in (at_work, left, others):
            os.utime(each, (0, 0))
        with tallies.folder():
            own = Path(os.environ[tallies.FOLDER_VARIABLE])
            assert set(tmp_path.iterdir()) == {own, at_work, others, linked, fresh}
    assert (others / "counter_0.db").exists()


def test_a_worker_that_cannot_start_leaves_no_metrics_behind(tmp_path: Path) -> None:
    """It would be tried again and again, and every scrape would read the files of every try."""
    code = (
        "from service import metrics\n"
        "from service.app import create_app; from service.errors import StartError; from service.settings import Settings\n"
        "metrics.keep_in_files(0)\n"
        "try: create_app(Settings(model='nope'))\n"
        "except StartError as error: print(error)"
    )
    environment = {**os.environ, "CAPSERVE_MODELS": str(BUNDLES), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "CAPSERVE_MODEL=nope" in ended.stdout
    assert list(tmp_path.iterdir()) == []


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
