"""capserve's default beside LitServe and BentoML: the same encoder file, pictures and load, one server after the other.

    python -m venv others && others/bin/pip install litserve bentoml onnxruntime pillow
    python -m benchmarks.others others/bin/python

They live in an environment of their own, since what they bring would change ours. Their answers are a label and lengths;
capserve's have a verdict, for which it draws every picture, and a pose as well.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from statistics import median

from benchmarks import load
from benchmarks.load import Load
from benchmarks.server import ROOT, SHIPPED, Server, capserve
from benchmarks.serving import CONCURRENCY, multipart, samples
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
    print(_versions(python), f"encoder {variant}", sep=", ")
    pictures = samples(bundle.read(ROOT / "tests/bundles/tiny"))
    requests = [multipart("/predict?reconstruct=false", picture) for picture in pictures]
    for workers in (1, 2):
        servers = {
            "capserve": capserve(made, variant, workers),
            "LitServe": _other([str(python), "benchmarks/litserve_endpoint.py", "{port}"], made, variant, workers, "/health"),
            "BentoML": _other(
                [str(python.with_name("bentoml")), "serve", "benchmarks.bentoml_endpoint:Digits", "--port={port}"],
                made, variant, workers, "/readyz",
            ),
        }  # fmt: skip
        found = {name: _loaded(name, server, requests, chosen.rounds, chosen.seconds) for name, server in servers.items()}
        print(f"workers of each: {workers}; at the end of each line how many times as many requests capserve answers")
        for name, loads in found.items():
            ratio = _rate(found["capserve"]) / _rate(loads)
            p50, p99 = (1e3 * median(getattr(each, quantile) for each in loads) for quantile in ("p50", "p99"))
            print(f"  {name:9} {_rate(loads):6.0f} requests/s   p50 {p50:5.1f} ms   p99 {p99:5.1f} ms   {ratio:5.2f}x")


def _loaded(name: str, server: Server, requests: list[bytes], rounds: int, seconds: float) -> list[Load]:
    """Each is up alone: processes of the others are at work even when nobody asks."""
    with server:
        load.put(server.port, requests, CONCURRENCY, seconds)
        loads = [load.put(server.port, requests, CONCURRENCY, seconds) for _ in range(rounds)]
    for each in loads:
        if each.failed:
            raise SystemExit(f"{each.failed} of {each.requests} requests failed at {name}")
    return loads


def _other(command: list[str], made: Bundle, variant: Variant, workers: int, ready_at: str) -> Server:
    environment = {"ENCODER": str(made.encoder(variant)), "WORKERS": str(workers), "BENTOML_DO_NOT_TRACK": "True"}
    return Server(command, environment, ready_at, heard=False)


def _versions(python: Path) -> str:
    told = f"from importlib.metadata import version; print(*(f'{{name}} {{version(name)}}' for name in {PACKAGES}), sep=', ')"
    return subprocess.run([python, "-c", told], check=True, capture_output=True, text=True).stdout.strip()


def _rate(loads: list[Load]) -> float:
    return median(each.rate for each in loads)


if __name__ == "__main__":
    main()
