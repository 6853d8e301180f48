"""The command line in its own process: run to the end, or started as a server whose log is read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.service.conftest import BUNDLES, reaching, wait_until_ready
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
    """Starts a server of tests/bundles that writes to `log`, and yields it at once, before it is ready."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # if it were a terminal, a hangup would end the server
            stderr=output,
            env={**os.environ, "CAPSERVE_MODELS": str(BUNDLES), **environment},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its workers, which would otherwise finish loading first
            process.wait()


@contextmanager
def started(log: Path, *flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Starts `capserve serve` on a free port; yields the process and its URL once it is ready."""
    with launched(log, [*CAPSERVE, "serve", "--port", "0", *flags], **environment) as process:
        appears(log, "http://", pause=0.02)
        url = re.findall(r"http://[\d.:]+", log.read_text())[0]
        with reaching(url) as client:
            wait_until_ready(client, 40)
        yield process, url


def appears(log: Path, words: str, times: int = 1, seconds: float = 20, pause: float = 0.05) -> None:
    until(lambda: log.read_text().count(words) >= times, seconds, pause, said=log.read_text)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in _command(child)]


def _command(child: str) -> bytes:
    try:
        return Path(f"/proc/{child}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
