"""The service's speed claims, as ratios measured in one run on this machine: `python -m benchmarks.serving`, about two minutes.

All servers are up at once and idle; each round loads one after the other for a moment, and the medians of the rounds are
compared, so that whatever else the machine does falls on all alike. Load comes from a process of its own on the same cores.
The file is not called http.py because Python's own http would then be it.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
from PIL import Image

from benchmarks import load
from benchmarks.load import Load
from benchmarks.untrained import bundle_of
from service import bundle
from service.bundle import IMAGES, LENGTHS, Bundle, Variant
from service.images import prepare
from service.process import cpus

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "models" / "compact"
CONCURRENCY = 32


@dataclass
class Server:
    """A process that listens, and what loading it gave."""

    command: list[str]
    environment: dict[str, str]
    ready_at: str
    query: str = ""
    port: int = 0
    seconds_to_ready: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    rounds: list[Load] = field(default_factory=list)

    def __enter__(self) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        began = time.perf_counter()
        command = [part.format(port=self.port) for part in self.command]
        self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | self.environment | {"CAPSERVE_PORT": str(self.port)})
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

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def resident_megabytes(self) -> float:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def load(self, pictures: Sequence[bytes], seconds: float, concurrency: int = CONCURRENCY, query: str = "") -> Load:
        requests = [_multipart(f"/predict{query or self.query}", picture) for picture in pictures]
        found = load.put(self.port, requests, concurrency, seconds)
        if found.failed:
            raise SystemExit(f"{found.failed} of {found.requests} requests failed on {' '.join(self.command)}")
        return found

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
    return Server([sys.executable, "-m", "service", "serve"], environment, "/readyz", query="?reconstruct=false")


@dataclass(frozen=True)
class Row:
    what: str
    reach: str
    found: str
    reached: bool


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=2.0, help="of load on each server in each round")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as work, ExitStack() as running:
        rows = _measure(Path(work), running, chosen.rounds, chosen.seconds)
    print(f"\n{cpus.available()} cores, {'wrk' if load.WRK else 'load.py'}, {chosen.rounds} rounds of {chosen.seconds:g} s")
    for row in rows:
        print(f"{'reached' if row.reached else 'MISSED ':7}  {row.what:62} {row.reach:24} {row.found}")


def _measure(work: Path, running: ExitStack, rounds: int, seconds: float) -> list[Row]:
    tiny = bundle.read(ROOT / "tests/bundles/tiny")
    pictures = _pictures(tiny)
    paper = bundle_of("paper", work / "paper", tiny)
    compact = bundle.read(SHIPPED) if SHIPPED.exists() else bundle_of("compact", work / "compact", tiny)
    print(f"shipped default: {'models/compact' if SHIPPED.exists() else 'compact, untrained'}", flush=True)
    default, two, paper_fp32, compact_fp32 = (
        running.enter_context(server)
        for server in (
            capserve(compact, "auto"),
            capserve(compact, "auto", 2),
            capserve(paper, "fp32"),
            capserve(compact, "fp32"),
        )
    )
    plain_paper, plain_compact = (running.enter_context(plain(made)) for made in (paper, compact))
    servers = {
        "plain, paper fp32": plain_paper,
        "plain, compact fp32": plain_compact,
        "capserve, paper fp32": paper_fp32,
        "capserve, compact fp32": compact_fp32,
        "capserve, shipped default": default,
        "capserve, shipped default, 2 workers": two,
    }
    alone: list[Load] = []
    drawn: list[Load] = []
    bare: list[float] = []
    for server in servers.values():
        server.load(pictures, 1)
    sent = _answered(two)
    for _ in range(rounds):
        for server in servers.values():
            server.rounds.append(server.load(pictures, seconds))
        drawn.append(default.load(pictures, seconds, query="?reconstruct=true"))
        alone.append(default.load(pictures, seconds / 2, concurrency=1))
        bare.append(_bare_run(compact))
    for name, server in servers.items():
        print(f"{name:38} {_summary(server.rounds)}")
    print(f"{'  with reconstructions':38} {_summary(drawn)}\n{'  concurrency 1':38} {_summary(alone)}", flush=True)
    counted, expected = _answered(two) - sent, sum(each.requests for each in two.rounds)
    return [
        *_against(default, plain_paper, "shipped default against plain, paper fp32", 7, 1 / 5),
        *_against(paper_fp32, plain_paper, "paper fp32 behind both", 1.4, 1),
        *_against(compact_fp32, plain_compact, "compact fp32 behind both", 1.2, 1),
        _at_least("two workers against one", _rate(two.rounds) / _rate(default.rounds), 1.3),
        # wrk does not count the requests that are under way when its time is up, the server does
        Row("requests in the metrics of two workers, of those sent", "all", f"{counted} of {expected}",
            0 <= counted - expected <= (rounds + 1) * CONCURRENCY),
        _at_least("with reconstruction and pose against without", _rate(drawn) / _rate(default.rounds), 0.6),
        _at_most("added latency at concurrency 1, median", (_median(alone, "p50") - median(bare)) * 1e3, 1, "ms"),
        _at_most("start to ready", default.seconds_to_ready, 1.5, "s"),
        _at_most("resident memory of one process after the load", default.resident_megabytes(), 300, "MB"),
    ]  # fmt: skip


def _against(ours: Server, theirs: Server, what: str, rate: float, p99: float) -> list[Row]:
    slower = _median(ours.rounds, "p99") / _median(theirs.rounds, "p99")
    return [
        _at_least(f"requests/s, {what}", _rate(ours.rounds) / _rate(theirs.rounds), rate),
        _at_most(f"p99, {what}", slower, p99, "x"),
    ]


def _at_least(what: str, found: float, reach: float) -> Row:
    return Row(what, f">= {reach:g} x", f"{found:.2f} x", found >= reach)


def _at_most(what: str, found: float, reach: float, unit: str) -> Row:
    return Row(what, f"<= {reach:g} {unit}", f"{found:.2f} {unit}", found <= reach)


def _rate(rounds: Sequence[Load]) -> float:
    return _median(rounds, "rate")


def _median(rounds: Sequence[Load], name: str) -> float:
    return median(getattr(each, name) for each in rounds)


def _summary(rounds: Sequence[Load]) -> str:
    p50, p99 = _median(rounds, "p50") * 1e3, _median(rounds, "p99") * 1e3
    return f"{_rate(rounds):7.0f} requests/s   p50 {p50:6.1f} ms   p99 {p99:6.1f} ms"


def _answered(server: Server) -> int:
    found = re.findall(r'^capserve_requests_total\{route="/predict",status="200"\} (\S+)', server.get("/metrics"), re.M)
    return int(sum(map(float, found)))


def _bare_run(made: Bundle, runs: int = 200) -> float:
    """Median seconds of one picture through the encoder that the default runs, and nothing else."""
    variant: Variant = "int8" if "int8" in made.manifest.variants and cpus.multiplies_int8() else "fp32"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cpus.available()
    session = onnxruntime.InferenceSession(made.encoder(variant), options, providers=["CPUExecutionProvider"])
    images = np.zeros((1, *made.manifest.image_shape), np.float32)
    return _median_seconds(lambda: session.run([LENGTHS.name], {IMAGES.name: images}), runs)


def _median_seconds(run: Callable[[], object], runs: int) -> float:
    taken = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return median(taken)


def _pictures(made: Bundle) -> list[bytes]:
    """PNG digits as MNIST has them, which is what people measure with, each turned a little."""
    pngs = []
    for image in made.example("fp32").images:
        for degrees in range(-15, 16, 5):
            turned = Image.fromarray((image[0] * 255).astype(np.uint8)).rotate(degrees)
            digit = prepare(turned, made.manifest.image_shape, normalise=True)
            buffer = io.BytesIO()
            Image.fromarray((digit[0] * 255).astype(np.uint8)).save(buffer, "PNG")
            pngs.append(buffer.getvalue())
    return pngs


def _multipart(path: str, picture: bytes) -> bytes:
    part = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="digit.png"\r\nContent-Type: image/png\r\n\r\n'
    return load.request(path, "multipart/form-data; boundary=cut", part + picture + b"\r\n--cut--\r\n")


if __name__ == "__main__":
    main()
