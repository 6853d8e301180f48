from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import uvloop

from service.process import door as door_module
from service.process.door import Door, drop_newcomers
from tests.service.launching import appears, launched, started
from tests.waiting import until

GUESTS = 50
TURNS = 6  # of the loop: as many as it takes to let one in
HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("closing", [False, True])
def test_all_pending_connections_are_accepted_together(closing: bool) -> None:
    """And before it closes."""
    let_in: list[asyncio.BaseTransport] = []

    class Guest(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            let_in.append(transport)

    async def scenario(listener: socket.socket) -> None:
        door = Door(listener, Guest)
        door.open()
        with ExitStack() as guests:
            for _ in range(GUESTS):
                guests.enter_context(socket.create_connection(listener.getsockname()))
            if closing:
                await door.close()
            else:
                for _ in range(TURNS):
                    await asyncio.sleep(0)
            assert len(let_in) == GUESTS
            if not closing:
                await door.close()
            for each in let_in:
                each.close()
            await asyncio.sleep(0)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        uvloop.run(scenario(listener))


def test_connections_wait_and_are_logged_when_file_descriptors_run_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with launched(log, ["bash", "-c", f"ulimit -n 60; exec {sys.executable} -m service serve --port 0 --linger 0"]) as process:
        appears(log, "ready: tiny")
        host, port = log.read_text().partition("http://")[2].split()[0].split(":")
        guests = [socket.create_connection((host, int(port))) for _ in range(70)]
        for each in guests:
            each.sendall(HEALTHZ)
        appears(log, "connections wait, since no more can be accepted (Too many open files)")
        for each in guests[:35]:  # they came first, and are in
            assert each.recv(4096).startswith(b"HTTP/1.1 200")
            each.close()
        for each in guests[35:]:
            each.settimeout(10)
            assert each.recv(4096).startswith(b"HTTP/1.1 200")
            each.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_the_door_closes_cleanly_without_free_file_descriptors(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause for which others wait outlasts the door, and finds none."""
    faults: list[str] = []

    async def scenario(listener: CrowdedSocket) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context)))
        door = Door(listener, asyncio.Protocol)
        door.open()
        with socket.create_connection(listener.getsockname()):
            await asyncio.sleep(0.05)
            await door.close()
            await asyncio.sleep(0.1)

    monkeypatch.setattr(door_module, "PAUSE", 0.08)
    with CrowdedSocket([errno.EMFILE] * 9) as listener:
        listener.bind(("127.0.0.1", 0))
        uvloop.run(scenario(listener))
    assert faults == []
    assert [each.partition(",")[0] for each in caplog.messages] == ["connections wait", "waiting connections are reset"]


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("fault", [errno.ECONNABORTED, errno.EPROTO, errno.EPERM])
def test_an_aborted_connection_does_not_affect_the_others(closing: bool, fault: int, caplog: pytest.LogCaptureFixture) -> None:
    let_in: list[asyncio.BaseTransport] = []

    class Guest(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            let_in.append(transport)

    async def scenario(listener: CrowdedSocket) -> None:
        door = Door(listener, Guest)
        door.open()
        with ExitStack() as guests:
            for _ in range(3):
                guests.enter_context(socket.create_connection(listener.getsockname()))
            if not closing:
                await asyncio.sleep(0.1)
            await door.close()
            assert len(let_in) == 3
            for each in let_in:
                each.close()
            await asyncio.sleep(0)

    with CrowdedSocket([fault]) as listener:
        listener.bind(("127.0.0.1", 0))
        uvloop.run(scenario(listener))
    assert caplog.messages == []


def test_accepting_pauses_after_a_permanent_error(caplog: pytest.LogCaptureFixture) -> None:
    """And does not keep the processor busy with it."""

    async def scenario(listener: CrowdedSocket) -> None:
        door = Door(listener, asyncio.Protocol)
        door.open()
        with socket.create_connection(listener.getsockname()):
            await asyncio.sleep(0.2)
            assert caplog.messages == ["connections wait, since no more can be accepted (Invalid argument)"]
            assert len(listener.reasons) == 8
            await door.close()

    with CrowdedSocket([errno.EINVAL] * 9) as listener:
        listener.bind(("127.0.0.1", 0))
        uvloop.run(scenario(listener))


def test_nobody_connects_between_the_last_accept_and_the_close() -> None:
    """They would be reset. Their SYN is dropped instead, and they are refused when it is sent again."""
    with socket.socket() as any_listener:
        if not drop_newcomers(any_listener):
            pytest.skip("the kernel drops nobody's SYN for us: needs Linux, and mostly CAP_NET_ADMIN")
    late: list[type] = []

    class SlowSocket(socket.socket):
        def close(self) -> None:
            if self.fileno() != -1:
                try:
                    socket.create_connection(self.getsockname(), timeout=0.1).close()
                except OSError as error:
                    late.append(type(error))
            super().close()

    async def scenario(listener: socket.socket) -> None:
        door = Door(listener, asyncio.Protocol)
        door.open()
        await door.close()

    with SlowSocket() as listener:
        listener.bind(("127.0.0.1", 0))
        uvloop.run(scenario(listener))
    assert late == [TimeoutError]


class CrowdedSocket(socket.socket):
    """Where accepting fails so often first, for these reasons."""

    def __init__(self, reasons: list[int]) -> None:
        super().__init__()
        self.reasons = reasons

    def accept(self) -> tuple[socket.socket, object]:
        if self.reasons:
            reason = self.reasons.pop()
            raise OSError(reason, os.strerror(reason))
        return super().accept()


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]], ids=["one worker", "two workers"])
def test_connected_clients_are_answered_when_the_port_closes(tmp_path: Path, flags: list[str]) -> None:
    """By clients who connect anew for each request, and go on when they are told that the server is no longer ready."""
    told: Counter[str] = Counter()

    def ask(address: tuple[str, int]) -> None:
        while "refused" not in told:
            try:
                with socket.create_connection(address, timeout=10) as connection:
                    connection.sendall(b"GET /reconstruct?label=7 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    answer = connection.recv(4096)
                    told["answered" if answer.startswith(b"HTTP/1.1 200") else "closed"] += 1
            except ConnectionRefusedError:
                told["refused"] += 1
            except ConnectionResetError:
                told["reset"] += 1

    with started(tmp_path / "log", "--linger", "0.3", *flags) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        clients = [threading.Thread(target=ask, args=((host, int(port)),)) for _ in range(24)]
        for each in clients:
            each.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        for each in clients:
            each.join(20)
        assert process.wait(10) == 0
    assert told["refused"]
    assert told["answered"] > len(clients)
    assert told.keys() == {"refused", "answered"}


@pytest.mark.parametrize("sent", [0, 20])
def test_a_request_in_transit_when_the_port_closes_is_answered(tmp_path: Path, sent: int) -> None:
    with started(tmp_path / "log", "--linger", "0") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(HEALTHZ[:sent])
            time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            until(lambda: is_closed(host, int(port)), 5, 0.01)
            connection.sendall(HEALTHZ[sent:])
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
        assert process.wait(10) == 0


def is_closed(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.1).close()
    except (ConnectionRefusedError, TimeoutError):  # the latter in the moment before it closes
        return True
    return False
