import asyncio
import errno
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.app import create_app
from service.engine import CapsNet
from service.errors import StartError
from service.process import listening
from service.process.server import Server, uvicorn_config
from service.process.workers import CANNOT_START
from tests.service.conftest import TINY, reaching, settings, wait_until_ready
from tests.service.launching import CAPSERVE, appears, launched, workers_of
from tests.service.processes import free_port
from tests.service.test_door import is_closed
from tests.waiting import until


def test_a_name_with_ipv4_and_ipv6_addresses_binds_to_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients try only 127.0.0.1 for localhost."""
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [six, four])
    with listening.bind("localhost", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "url"),
    [(("127.0.0.1", 8000), "http://127.0.0.1:8000"), (("::1", 8000, 0, 0), "http://[::1]:8000")],
)
def test_an_address_is_written_as_a_url(address: tuple[object, ...], url: str) -> None:
    assert listening.url(address) == url


def test_a_link_local_address_keeps_its_interface() -> None:
    assert listening.numeric_address(("::1", 8000, 0, 0)) == ("::1", 8000)
    assert listening.numeric_address(("fe80::1", 8000, 0, 1)) == ("fe80::1%lo", 8000)


@pytest.mark.parametrize(
    ("hosts", "flags"),
    [
        (("0.0.0.0", "127.0.0.1"), []),
        (("127.0.0.1", "127.0.0.1"), ["--workers", "2"]),  # each worker has its own socket
    ],
    ids=["every address", "two workers"],
)
def test_only_one_of_two_servers_started_on_one_port_serves(tmp_path: Path, hosts: tuple[str, str], flags: list[str]) -> None:
    """Until one of them listens, both could bind the port: two that shared it would answer in turn."""
    port = free_port()
    command = [*CAPSERVE, "serve", "--port", str(port), "--linger", "0", *flags, "--host"]
    with launched(tmp_path / "0", [*command, hosts[0]]) as one, launched(tmp_path / "1", [*command, hosts[1]]) as other:
        until(lambda: (one.poll(), other.poll()) != (None, None), 20)
        lost, won, name = (one, other, "0") if one.poll() is not None else (other, one, "1")
        assert lost.returncode == CANNOT_START
        told = (tmp_path / name).read_text()
        assert f"cannot listen on {hosts[int(name)]}:{port}: " in told
        assert "Traceback" not in told
        with reaching(f"http://127.0.0.1:{port}") as client:
            wait_until_ready(client, 20)
        won.send_signal(signal.SIGTERM)
        assert won.wait(10) == 0


def test_two_servers_on_different_addresses_share_a_port(tmp_path: Path) -> None:
    port = free_port()
    hosts = {"127.0.0.1": "1", "127.0.0.2": "2"}  # host -> number of workers
    with ExitStack() as running:
        for host, workers in hosts.items():
            command = [*CAPSERVE, "serve", "--port", str(port), "--workers", workers, "--host", host]
            running.enter_context(launched(tmp_path / host, command))
        for host in hosts:
            with reaching(f"http://{host}:{port}") as client:
                wait_until_ready(client, 20)


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]], ids=["one worker", "two workers"])
def test_a_new_server_may_start_while_the_old_one_drains(tmp_path: Path, flags: list[str]) -> None:
    port = free_port()
    command = [*CAPSERVE, "serve", "--port", str(port), "--linger", "0"]
    with launched(tmp_path / "0", [*command, *flags]) as before, reaching(f"http://127.0.0.1:{port}") as client:
        wait_until_ready(client, 20)
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\n")
            time.sleep(0.2)
            before.send_signal(signal.SIGTERM)
            until(lambda: is_closed("127.0.0.1", port), 5, 0.05)
            with launched(tmp_path / "1", command):
                with reaching(f"http://127.0.0.1:{port}") as again:
                    wait_until_ready(again, 20)
                assert before.poll() is None
            slow.sendall(bytes(100))
            assert slow.recv(100).startswith(b"HTTP/1.1 415")
        assert before.wait(10) == 0


@pytest.mark.parametrize("fault", [errno.EAFNOSUPPORT, errno.EACCES])
def test_claiming_a_port_is_skipped_where_no_socket_is_available(monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    """As under systemd's RestrictAddressFamilies, or on a Mac."""

    def forbidden(_: int) -> socket.socket:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(socket, "socket", forbidden)
    with listening.claim("127.0.0.1", 8000):
        pass


def test_a_server_that_lost_all_its_workers_keeps_its_port(tmp_path: Path) -> None:
    """While no worker listens another server could bind it, and both would answer in turn once the workers are back."""
    port, log, models = free_port(), tmp_path / "one", tmp_path / "models"
    command = [*CAPSERVE, "serve", "--port", str(port), "--linger", "0", "--workers", "2"]
    shutil.copytree(TINY, models / "tiny")
    with launched(log, command, CAPSERVE_MODELS=str(models)) as one:
        appears(log, "ready: tiny", 2)
        (models / "tiny/manifest.json").rename(models / "manifest.json")  # so that none comes back for now
        for each in workers_of(one):
            os.kill(each, signal.SIGKILL)
        appears(log, "died with status 2")
        with launched(tmp_path / "other", [*CAPSERVE, "serve", "--port", str(port)]) as other:
            assert other.wait(20) == CANNOT_START
        assert f"cannot listen on 127.0.0.1:{port}: another capserve has claimed it" in (tmp_path / "other").read_text()
        (models / "manifest.json").rename(models / "tiny/manifest.json")
        with reaching(f"http://127.0.0.1:{port}") as client:
            wait_until_ready(client, 40)
        one.send_signal(signal.SIGTERM)
        assert one.wait(15) == 0


SLOW_TO_LOAD = """
import sys, time
from service.__main__ import main
from service.process import server, workers
workers.STUCK, workers.TIMES_SLOWEST = 8.0, 1.0
uvicorn_config = server.uvicorn_config
def slowly(*arguments):
    print("loads", file=sys.stderr, flush=True)
    time.sleep(3)
    return uvicorn_config(*arguments)
server.uvicorn_config = slowly
if __name__ == "__main__":
    sys.exit(main(["serve", "--workers", "2", "--linger", "0", *sys.argv[1:]]))
"""


@pytest.fixture
def slow_to_load(tmp_path: Path) -> list[str]:
    """A command for two workers that take three seconds to load, and count as stuck after eight."""
    (tmp_path / "server.py").write_text(SLOW_TO_LOAD)
    return [sys.executable, str(tmp_path / "server.py")]


def test_workers_do_not_listen_if_their_supervisor_died_first(slow_to_load: list[str], tmp_path: Path) -> None:
    """The next capserve may have the port by then."""
    port, log = free_port(), tmp_path / "log"
    with launched(log, [*slow_to_load, "--port", str(port)]) as process:
        appears(log, "loads", 2)
        process.kill()
        until(
            lambda: log.read_text().count("the process that started this worker is gone") == 2 or not is_closed("127.0.0.1", port)
        )
        assert is_closed("127.0.0.1", port)
        assert "is gone: stopping" not in log.read_text()  # which a worker that listens would say


SLOW_TO_WARM = """
import sys, time
from service import engine
from service.__main__ import main
def slowly(*_):
    print("warms", file=sys.stderr, flush=True)
    time.sleep(20)
engine.CapsNet.warm_up = slowly
if __name__ == "__main__":
    sys.exit(main(["serve", "--port", "0", "--workers", "2", "--linger", "0"]))
"""


def test_workers_told_to_stop_while_models_warm_up_stop_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "server.py").write_text(SLOW_TO_WARM)
    with launched(log, [sys.executable, str(tmp_path / "server.py")]) as process:
        appears(log, "warms", 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    assert "ERROR" not in log.read_text()


FAULTY = """
import sys
from service import app
from service.__main__ import main
def create_app(*_):
    raise RuntimeError("boom")
app.create_app = create_app
if __name__ == "__main__":
    sys.exit(main(["serve", "--port", "0", "--log-format", "json", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_an_unexpected_error_at_startup_is_logged_as_json(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    (tmp_path / "server.py").write_text(FAULTY)
    with launched(log, [sys.executable, str(tmp_path / "server.py"), "--workers", str(workers)]) as process:
        appears(log, "boom", workers)
        if workers == 1:
            assert process.wait(10) == 1
        process.kill()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert any("RuntimeError: boom" in json.dumps(each) for each in records)


def test_a_worker_stuck_before_listening_is_replaced_if_others_listen(slow_to_load: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with launched(log, [*slow_to_load, "--port", "0"]) as process:
        appears(log, "ready: tiny", 2)
        time.sleep(0.5)  # they listen, and beat, a moment later
        first, _ = workers_of(process)
        loaded = log.read_text().count("loads")
        os.kill(first, signal.SIGKILL)
        appears(log, "loads", loaded + 1)
        (still,) = set(workers_of(process)) - {first, _}
        os.kill(still, signal.SIGSTOP)
        appears(log, f"worker {still} has stood still for")
        appears(log, "ready: tiny", 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


def test_serving_raises_start_error_if_another_program_took_the_port(
    nets: dict[str, CapsNet], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = settings()
    app = create_app(wanted, nets)
    with listening.bind("127.0.0.1", 0) as listener, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(listener.getsockname())
        other.listen()
        server = Server(uvicorn_config(app, wanted), app.state.service.catalogue, wanted.linger, listener, beat=lambda: None)
        with pytest.raises(StartError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use; choose another"):
            asyncio.run(server.serve())
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []  # the app's end is not logged as a fault


def test_the_open_files_limit_is_raised_to_the_hard_limit(tmp_path: Path) -> None:
    """Under bash, which, as other parents do, passes on a limit of its own."""
    few, log = 64, tmp_path / "log"
    command = ["bash", "-c", f"ulimit -S -n {few}; exec {sys.executable} -m service serve --port 0 --linger 0 --workers 2"]
    with launched(log, command) as process:
        appears(log, "ready: tiny", 2)
        for each in (process.pid, *workers_of(process)):
            _, _, limit = Path(f"/proc/{each}/limits").read_text().partition("Max open files")
            soft, hard = limit.split()[:2]
            assert soft == hard != str(few)
