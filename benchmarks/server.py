"""A server in a process of its own, started for a benchmark and stopped after it: ours, the plain endpoint, or another's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from service.bundle import Bundle
from service.manifest import Variant

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "models" / "compact"


@dataclass
class Server:
    command: list[str]
    environment: dict[str, str]
    ready_at: str
    heard: bool = True  # or what it says is thrown away
    port: int = 0
    seconds_to_ready: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        began = time.perf_counter()
        command = [part.format(port=self.port) for part in self.command]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | self.environment | {"CAPSERVE_PORT": str(self.port)},
            stdout=None if self.heard else subprocess.DEVNULL,
            stderr=None if self.heard else subprocess.DEVNULL,
            start_new_session=True,
        )
        while not self._ready():
            if self.process.poll() is not None or time.perf_counter() - began > 60:
                raise SystemExit(f"{' '.join(command)} did not become ready")
            time.sleep(0.005)
        self.seconds_to_ready = time.perf_counter() - began
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(40)
        with suppress(ProcessLookupError):  # LitServe leaves its workers behind, and they never rest
            os.killpg(self.process.pid, signal.SIGKILL)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def resident_megabytes(self) -> float:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def _ready(self) -> bool:
        try:
            self.get(self.ready_at)
        except (urllib.error.URLError, ConnectionError):
            return False
        return True


def plain(made: Bundle) -> Server:
    command = [sys.executable, "-m", "uvicorn", "benchmarks.plain_endpoint:app", "--port={port}", "--log-level=error"]
    return Server(command + ["--no-access-log"], {"ENCODER": str(made.encoder("fp32"))}, "/openapi.json")


def capserve(made: Bundle, variant: Variant | str, workers: int = 1) -> Server:
    settings = {"MODELS": str(made.folder.parent), "MODEL": made.manifest.name, "VARIANT": variant, "WORKERS": str(workers)}
    environment = {f"CAPSERVE_{name}": value for name, value in settings.items()} | {"CAPSERVE_LOG_LEVEL": "warning"}
    return Server([sys.executable, "-m", "service", "serve"], environment, "/readyz")
