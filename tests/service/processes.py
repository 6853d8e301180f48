"""A server in its own process, and a client plain enough to misbehave in any way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.service.conftest import BUNDLES, drawn, encoded, reaching, wait_until_ready

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Process:
    port: int
    popen: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident_megabytes(self) -> float:
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def metric(self, name: str) -> float:
        """Sums all samples that begin with `name`. The metric must exist; samples with labels appear when first counted."""
        with reaching(self.url) as client:
            text = client.get("/metrics").text
        assert f"# HELP {name.partition('{')[0].removesuffix('_sum')}" in text, f"expected a metric {name}, found none"
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)


def free_port() -> int:
    """Finds a port below those that the kernel hands out, so that no connection takes it while a server starts.

    The kernel's begin at 32,768. Ray takes half a minute to start, and opens connections by the hundred.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no port from 20,000 to 30,000 is free")


@contextlib.contextmanager
def process(
    seconds_a_batch: float = 0.0, seconds_a_picture: float = 0.0, seconds_a_small_one: float = 0.0, **settings: object
) -> Iterator[Process]:
    """Runs `capserve serve` of tests/bundles, by default without lingering; on SIGTERM it must exit with status 0."""
    port = free_port()
    values = {"models": BUNDLES, "port": port, "log_level": "error", "linger": 0} | settings
    environment = os.environ | {f"CAPSERVE_{name.upper()}": str(value) for name, value in values.items()}
    seconds = seconds_a_batch, seconds_a_picture, seconds_a_small_one
    command = ["-m", "tests.service.slow_server", *map(str, seconds)] if any(seconds) else ["-m", "service", "serve"]
    popen = subprocess.Popen([sys.executable, *command], env=environment, cwd=ROOT)
    started = Process(port, popen)
    try:
        with reaching(started.url) as client:
            wait_until_ready(client, 30, lambda: popen.poll() is None)
        yield started
        started.terminate()
        assert popen.wait(30) == 0
    finally:
        if popen.poll() is None:
            popen.kill()
            popen.wait()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float


def request(path: str, body: bytes, content_type: str = "image/png") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


# The size that the network takes, and not normalised: these tests are about many requests, not about pictures.
DIGIT = encoded(drawn("7", 28))
PREDICT = request("/predict?normalise=none", DIGIT)


class Connection:
    """One keep-alive connection, on which a test may write anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    async def to(server: Process) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", server.port))

    async def ask(self, raw: bytes) -> Answer:
        began = time.perf_counter()
        self.writer.write(raw)
        return await self.answer(began)

    async def answer(self, began: float) -> Answer:
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(first.split()[1]), headers, body, time.perf_counter() - began)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def ask(server: Process, raw: bytes) -> Answer:
    """Sends one request on its own connection."""
    connection = await Connection.to(server)
    try:
        return await connection.ask(raw)
    finally:
        await connection.close()
