"""capserve's default beside LitServe and BentoML: the same encoder file, pictures and load, one server after the other.

    python -m venv others && others/bin/pip install litserve bentoml onnxruntime pillow
    python -m benchmarks.others others/bin/python

They live in an environment of their own, since what they bring would change ours. Their answers are a label and lengths;
capserve's have a verdict, for which it draws every picture, and a pose as well. Labels must be the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import urllib.request
from importlib.metadata import version
from pathlib import Path
from statistics import median

from benchmarks import load
from benchmarks.load import Load
from benchmarks.server import ROOT, SHIPPED, Server, capserve
from benchmarks.serving import CONCURRENCY, MULTIPART, multipart, samples
from service import bundle
from service.bundle import Bundle
from service.manifest import Variant
from service.process import cpus

PACKAGES = ("litserve", "bentoml", "onnxruntime")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("python", type=Path, help="of the environment that has them")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=2.0, help="of load on each server in each round")
    chosen = options.parse_args()
    made, python = bundle.read(SHIPPED), chosen.python.absolute()
    variant: Variant = "int8" if cpus.multiplies_int8() else "fp32"
    print(f"{_versions(python)}; here onnxruntime {version('onnxruntime')}, encoder {variant}")
    pictures = samples(bundle.read(ROOT / "tests/bundles/tiny"))
    requests = [multipart("/predict?reconstruct=false", picture) for picture in pictures]
    litserve = [str(python), "benchmarks/litserve_endpoint.py", "{port}"]
    bentoml = [str(python.with_name("bentoml")), "serve", "benchmarks.bentoml_endpoint:Digits"]
    bentoml += ["--host=127.0.0.1", "--port={port}"]
    for workers in (1, 2):
        servers = {
            "capserve": capserve(made, variant, workers),
            "LitServe": _other(litserve, "/health", made, variant, WORKERS=str(workers), BATCH="16"),
            "LitServe, no batches": _other(litserve, "/health", made, variant, WORKERS=str(workers), BATCH="1"),
            "BentoML": _other(bentoml, "/readyz", made, variant, WORKERS=str(workers)),
        }
        labels, found = set(), {}
        for name, server in servers.items():
            with server:  # alone: processes of the others are at work even when nobody asks
                labels.add(tuple(_label(server, each) for each in requests))
                found[name] = [_loaded(name, server, requests, chosen.seconds) for _ in range(1 + chosen.rounds)][1:]
        if len(labels) > 1:
            raise SystemExit(f"expected the same labels from all, found {labels}")
        print(f"workers of each: {workers}; at the end of each line how many times as many requests capserve answers")
        for name, loads in found.items():
            ratio = _rate(found["capserve"]) / _rate(loads)
            p50, p99 = (1e3 * median(getattr(each, quantile) for each in loads) for quantile in ("p50", "p99"))
            print(f"  {name:20} {_rate(loads):6.0f} requests/s   p50 {p50:5.1f} ms   p99 {p99:5.1f} ms   {ratio:5.2f}x")


def _label(server: Server, request: bytes) -> str:
    body = request.partition(b"\r\n\r\n")[2]
    asked = urllib.request.Request(f"http://127.0.0.1:{server.port}/predict", body, {"Content-Type": MULTIPART})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        said = json.load(answer)
    return str((said[0] if isinstance(said, list) else said)["label"])  # BentoML answers a batch of one


def _loaded(name: str, server: Server, requests: list[bytes], seconds: float) -> Load:
    found = load.put(server.port, requests, CONCURRENCY, seconds)
    if found.failed:
        raise SystemExit(f"{found.failed} of {found.requests} requests failed at {name}")
    return found


def _other(command: list[str], ready_at: str, made: Bundle, variant: Variant, **settings: str) -> Server:
    environment = {"ENCODER": str(made.encoder(variant)), "BENTOML_DO_NOT_TRACK": "True", **settings}
    return Server(command, environment, ready_at, heard=False)


def _versions(python: Path) -> str:
    told = f"from importlib.metadata import version; print(*(f'{{name}} {{version(name)}}' for name in {PACKAGES}), sep=', ')"
    return subprocess.run([python, "-c", told], check=True, capture_output=True, text=True).stdout.strip()


def _rate(loads: list[Load]) -> float:
    return median(each.rate for each in loads)


if __name__ == "__main__":
    main()
