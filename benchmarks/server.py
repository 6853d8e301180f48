"""A server in a process of its own, started for a benchmark and stopped after it: ours, the plain endpoint, or another's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from service.bundle import Bundle
from service.manifest import Variant

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "models" / "compact"


@dataclass
class Server:
    command: list[str]
    environment: dict[str, str]
    ready_path: str
    shows_output: bool = True  # whether its output is shown; if not, then only when it does not start
    port: int = 0
    seconds_to_ready: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    output: IO[bytes] | None = None

    def __enter__(self) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        began = time.perf_counter()
        command = [part.format(port=self.port) for part in self.command]
        self.output = None if self.shows_output else tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | self.environment | {"CAPSERVE_PORT": str(self.port)},
            stdout=self.output,
            stderr=self.output,
        )
        try:
            while not self._ready():
                if self.process.poll() is not None or time.perf_counter() - began > 60:
                    raise SystemExit(f"{' '.join(command)} did not become ready{self._output_tail()}")
                time.sleep(0.005)
        except BaseException:
            self._stop()
            raise
        self.seconds_to_ready = time.perf_counter() - began
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        """Ends it and all that it started: LitServe leaves its workers behind, and they are always busy."""
        assert self.process is not None
        family = list(_descendants(self.process.pid))
        self.process.terminate()
        try:
            self.process.wait(40)
        finally:
            for each in (self.process.pid, *family):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)

    def _output_tail(self) -> str:
        if self.output is None:
            return ""
        self.output.seek(0)
        return f": {self.output.read().decode(errors='replace')[-2000:]}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def resident_megabytes(self) -> float:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def processor_seconds(self) -> float:
        """Processor time used so far, on all cores, by it and all that it started."""
        assert self.process is not None
        family = (self.process.pid, *_descendants(self.process.pid))
        return sum(_ticks(each) for each in family) / os.sysconf("SC_CLK_TCK")

    def _ready(self) -> bool:
        try:
            self.get(self.ready_path)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True


def _descendants(process: int) -> Iterator[int]:
    for children in Path("/proc").glob(f"{process}/task/*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _descendants(child)


def _ticks(process: int) -> int:
    """Clock ticks of user and system time, counting fields after the program's name, which is in brackets."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def plain(model_bundle: Bundle) -> Server:
    command = [sys.executable, "-m", "uvicorn", "benchmarks.plain_endpoint:app", "--port={port}", "--log-level=error"]
    return Server(command + ["--no-access-log"], {"ENCODER": str(model_bundle.encoder("fp32"))}, "/openapi.json")


def capserve(model_bundle: Bundle, variant: Variant | str, workers: int = 1) -> Server:
    settings = {
        "MODELS": str(model_bundle.folder.parent),
        "MODEL": model_bundle.manifest.name,
        "VARIANT": variant,
        "WORKERS": str(workers),
    }
    environment = {f"CAPSERVE_{name}": value for name, value in settings.items()} | {"CAPSERVE_LOG_LEVEL": "warning"}
    return Server([sys.executable, "-m", "service", "serve"], environment, "/readyz")
