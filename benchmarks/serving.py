"""The service's speed claims, as ratios measured in one run on this machine: `python -m benchmarks.serving`, about two minutes.

All servers are up at once and idle; each round loads one after the other for a moment, and the medians of the rounds are
compared, so that whatever else the machine does falls on all alike. Load comes from a process of its own on the same cores.
The file is not called http.py because Python's own http would then be it.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

from benchmarks import load
from benchmarks.load import Load
from benchmarks.server import ROOT, SHIPPED, Server, capserve, plain
from service import bundle, sessions
from service.bundle import IMAGES, LENGTHS, Bundle
from service.images import prepare
from service.manifest import Variant
from service.process import cpus

CONCURRENCY, SCANNERS = 32, 16  # clients; on a slow core 32 scans at once would wait longer than the service allows
MULTIPART = "multipart/form-data; boundary=cut"
BARE_RUNS = 200
SCAN, WRITTEN = (320, 240), 160  # pixels of a sheet, and of the digit's frame on it

# The loads, by their names in the output.
PLAIN_PAPER, PLAIN_COMPACT = "plain, paper fp32", "plain, compact fp32"
PAPER, COMPACT = "capserve, paper fp32", "capserve, compact fp32"
DEFAULT, TWO = "capserve, shipped default", "capserve, shipped default, 2 workers"
DRAWN, ALONE = "  with reconstructions", "  concurrency 1"
SCANS, SCANS_TWO = "  of scans, which it normalises", "  of scans, 2 workers"


@dataclass(frozen=True)
class Row:
    claim: str
    goal: str
    found: str
    reached: bool


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=2.0, help="of load on each server in each round")
    chosen = options.parse_args()
    if chosen.seconds < 2:
        options.error("--seconds: expected 2 or more, since wrk counts whole ones and one client has half of them")
    with ExitStack() as running:
        rows = _measure(running, chosen.rounds, chosen.seconds)
    print(f"\n{cpus.available()} cores, {'wrk' if load.WRK else 'load.py'}, {chosen.rounds} rounds of {chosen.seconds:g} s")
    for row in rows:
        print(f"{'reached' if row.reached else 'MISSED ':7}  {row.claim:62} {row.goal:24} {row.found}")


def _measure(running: ExitStack, rounds: int, seconds: float) -> list[Row]:
    pictures, scans = samples(bundle.read(ROOT / "tests/bundles/tiny"))
    compact, paper = bundle.read(SHIPPED), bundle.read(SHIPPED.with_name("paper"))
    default, two, paper_fp32, compact_fp32 = (
        running.enter_context(server)
        for server in (
            capserve(compact, "auto"),
            capserve(compact, "auto", 2),
            capserve(paper, "fp32"),
            capserve(compact, "fp32"),
        )
    )
    plain_paper, plain_compact = (running.enter_context(plain(model_bundle)) for model_bundle in (paper, compact))
    servers = {
        PLAIN_PAPER: plain_paper,
        PLAIN_COMPACT: plain_compact,
        PAPER: paper_fp32,
        COMPACT: compact_fp32,
        DEFAULT: default,
        TWO: two,
    }
    measured: dict[str, list[Load]] = {name: [] for name in (*servers, DRAWN, ALONE, SCANS, SCANS_TWO)}
    bare: list[float] = []
    busy: dict[str, list[float]] = {name: [] for name in servers}
    for server in servers.values():
        measure_load(server, pictures, 1)
    answered_before = _answered_requests(two)
    variant = json.loads(default.get(f"/models/{compact.manifest.name}"))["variant"]
    for _ in range(rounds):
        for name, server in servers.items():
            before = server.processor_seconds()
            measured[name].append(measure_load(server, pictures, seconds))
            busy[name].append((server.processor_seconds() - before) / seconds)
        measured[DRAWN].append(measure_load(default, pictures, seconds, query="?reconstruct=true"))
        measured[SCANS].append(measure_load(default, scans, seconds, SCANNERS))
        measured[SCANS_TWO].append(measure_load(two, scans, seconds, SCANNERS))
        measured[ALONE].append(measure_load(default, pictures, seconds / 2, concurrency=1))
        bare.append(_bare_run(compact, variant))
    for name, loads in measured.items():
        cores = f"   {median(busy[name]):.2f} cores" if name in busy else ""
        print(f"{name:38} {_summary(loads)}{cores}", flush=True)
    answered = _answered_requests(two) - answered_before
    expected = sum(each.requests for each in measured[TWO] + measured[SCANS_TWO])
    return [
        *_comparison(measured[DEFAULT], measured[PLAIN_PAPER], "shipped default against plain, paper fp32", 7, 1 / 5),
        *_comparison(measured[PAPER], measured[PLAIN_PAPER], "paper fp32 behind both", 1.4, 1),
        *_comparison(measured[COMPACT], measured[PLAIN_COMPACT], "compact fp32 behind both", 1.2, 1),
        _at_least("two workers against one", _rate(measured[TWO]) / _rate(measured[DEFAULT]), 1.3),
        # wrk does not count the requests that are under way when its time is up, the server does
        Row("requests in the metrics of two workers, of those sent", "all", f"{answered} of {expected}",
            0 <= answered - expected <= (2 * rounds + 1) * CONCURRENCY),
        _at_least("with reconstruction and pose against without", _rate(measured[DRAWN]) / _rate(measured[DEFAULT]), 0.6),
        _at_most("added latency at concurrency 1, median", (_median(measured[ALONE], "p50") - median(bare)) * 1e3, 1, "ms"),
        _at_most("start to ready", default.seconds_to_ready, 1.5, "s"),
        _at_most("resident memory of one process after the load", default.resident_megabytes(), 300, "MB"),
    ]  # fmt: skip


def measure_load(
    server: Server, pictures: Sequence[bytes], seconds: float, concurrency: int = CONCURRENCY, query: str = "?reconstruct=false"
) -> Load:
    """Loads one server; the plain endpoint takes no query and ignores this one."""
    requests = [multipart(f"/predict{query}", picture) for picture in pictures]
    result = load.send_load(server.port, requests, concurrency, seconds)
    if result.failed:
        raise SystemExit(f"{result.failed} of {result.requests} requests failed on {' '.join(server.command)}")
    return result


def _comparison(ours: Sequence[Load], theirs: Sequence[Load], claim: str, rate: float, p99: float) -> list[Row]:
    slower = _median(ours, "p99") / _median(theirs, "p99")
    return [
        _at_least(f"requests/s, {claim}", _rate(ours) / _rate(theirs), rate),
        _at_most(f"p99, {claim}", slower, p99, "x"),
    ]


def _at_least(claim: str, found: float, goal: float) -> Row:
    return Row(claim, f">= {goal:g} x", f"{found:.2f} x", found >= goal)


def _at_most(claim: str, found: float, goal: float, unit: str) -> Row:
    return Row(claim, f"<= {goal:g} {unit}", f"{found:.2f} {unit}", found <= goal)


def _rate(rounds: Sequence[Load]) -> float:
    return _median(rounds, "rate")


def _median(rounds: Sequence[Load], name: str) -> float:
    return float(median(getattr(each, name) for each in rounds))


def _summary(rounds: Sequence[Load]) -> str:
    p50, p99 = _median(rounds, "p50") * 1e3, _median(rounds, "p99") * 1e3
    return f"{_rate(rounds):7.0f} requests/s   p50 {p50:6.1f} ms   p99 {p99:6.1f} ms"


def _answered_requests(server: Server) -> int:
    counts = re.findall(r'^capserve_requests_total\{route="/predict",status="200"\} (\S+)', server.get("/metrics"), re.M)
    return int(sum(map(float, counts)))


def _bare_run(model_bundle: Bundle, variant: Variant) -> float:
    """Median seconds of one picture through the encoder, and nothing else."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cpus.available()
    sessions.sum_exactly(options)
    session = onnxruntime.InferenceSession(model_bundle.encoder(variant), options, providers=["CPUExecutionProvider"])
    images = np.zeros((1, *model_bundle.manifest.image_shape), np.float32)
    seconds = []
    for _ in range(BARE_RUNS):
        began = time.perf_counter()
        session.run([LENGTHS.name], {IMAGES.name: images})
        seconds.append(time.perf_counter() - began)
    return median(seconds)


class Samples(NamedTuple):
    """The same digits twice, as PNGs."""

    pictures: list[bytes]  # as MNIST has them, which is what people measure with
    scans: list[bytes]  # as people have them: larger, in black on white, not in the middle of the sheet


def samples(model_bundle: Bundle) -> Samples:
    """A bundle's examples, each turned a little."""
    results = Samples([], [])
    for image in model_bundle.example("fp32").images:
        for degrees in range(-15, 16, 5):
            turned = Image.fromarray((image[0] * 255).astype(np.uint8)).rotate(degrees)
            digit = prepare(turned, model_bundle.manifest.image_shape, normalise=True)
            results.pictures.append(_png(Image.fromarray((digit[0] * 255).astype(np.uint8))))
            sheet = Image.new("L", SCAN)
            sheet.paste(turned.resize((WRITTEN, WRITTEN), Image.Resampling.BICUBIC), (WRITTEN // 4, WRITTEN // 8))
            results.scans.append(_png(ImageOps.invert(sheet)))
    return results


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def multipart(path: str, picture: bytes) -> bytes:
    part = b'--cut\r\nContent-Disposition: form-data; name="file"; filename="digit.png"\r\nContent-Type: image/png\r\n\r\n'
    return load.request(path, MULTIPART, part + picture + b"\r\n--cut--\r\n")


if __name__ == "__main__":
    main()
