"""capserve's default beside Triton, LitServe and BentoML: the same encoder file, pictures and load, one server after the other.

    python -m venv others && others/bin/pip install nvidia-pytriton litserve bentoml onnxruntime pillow
    python -m benchmarks.others others/bin/python

They live in an environment of their own, since what they bring would change ours. Their answers are a label and lengths;
capserve's have a verdict, for which it draws every picture, and a pose as well. Labels must be the same.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
from collections.abc import Callable
from http.client import HTTPResponse
from importlib.metadata import version
from pathlib import Path
from statistics import median
from struct import pack
from typing import Any, NamedTuple

from benchmarks import load
from benchmarks.load import Load
from benchmarks.server import ROOT, SHIPPED, Server, capserve
from benchmarks.serving import CONCURRENCY, multipart, samples
from service import bundle
from service.bundle import Bundle
from service.manifest import Variant
from service.process import cpus

PACKAGES = ("nvidia-pytriton", "litserve", "bentoml", "onnxruntime")


class Rival(NamedTuple):
    server: Server
    requests: list[bytes]
    label: Callable[[Any], Any]  # from the answer


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("python", type=Path, help="of the environment that has them")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=2.0, help="of load on each server in each round")
    chosen = options.parse_args()
    model_bundle, python = bundle.read(SHIPPED), chosen.python.absolute()
    variant: Variant = "int8" if cpus.has_dot_products() else "fp32"  # elsewhere the others' sums of int8 products saturate
    print(f"{_versions(python)}; here onnxruntime {version('onnxruntime')}, encoder {variant}")
    pictures = samples(bundle.read(ROOT / "tests/bundles/tiny")).pictures
    for workers in (1, 2):
        labels, rounds = set(), {}
        for name, rival in _rivals(model_bundle, variant, python, pictures, workers).items():
            with rival.server as server:  # alone: processes of the others are busy even without requests
                labels.add(tuple(str(rival.label(_answer(server, each))) for each in rival.requests))
                rounds[name] = [_measure_load(name, server, rival.requests, chosen.seconds) for _ in range(1 + chosen.rounds)][1:]
        if len(labels) > 1:
            raise SystemExit(f"expected the same labels from all, found {labels}")
        print(f"workers of each: {workers}; at the end of each line how many times as many requests capserve answers")
        for name, loads in rounds.items():
            ratio = _rate(rounds["capserve"]) / _rate(loads)
            p50, p99 = (1e3 * median(getattr(each, quantile) for each in loads) for quantile in ("p50", "p99"))
            print(f"  {name:20} {_rate(loads):6.0f} requests/s   p50 {p50:5.1f} ms   p99 {p99:5.1f} ms   {ratio:5.2f}x")


def _rivals(model_bundle: Bundle, variant: Variant, python: Path, pictures: list[bytes], workers: int) -> dict[str, Rival]:
    def rival_server(command: list[str], ready_path: str, **settings: str) -> Server:
        environment = {"ENCODER": str(model_bundle.encoder(variant)), "WORKERS": str(workers), "BENTOML_DO_NOT_TRACK": "True"}
        return Server(command, environment | settings, ready_path, shows_output=False)

    triton = [str(python), "benchmarks/triton_endpoint.py", "{port}"]
    litserve = [str(python), "benchmarks/litserve_endpoint.py", "{port}"]
    bentoml = [str(python.with_name("bentoml")), "serve", "benchmarks.bentoml_endpoint:Digits"]
    bentoml += ["--host=127.0.0.1", "--port={port}"]
    forms = [multipart("/predict?reconstruct=false", picture) for picture in pictures]
    inferences = [_inference(picture) for picture in pictures]
    return {
        "capserve": Rival(capserve(model_bundle, variant, workers), forms, lambda answer: answer["label"]),
        "Triton": Rival(rival_server(triton, "/v2/health/ready"), inferences, lambda answer: answer["outputs"][0]["data"][0]),
        "LitServe": Rival(rival_server(litserve, "/health", BATCH="16"), forms, lambda answer: answer["label"]),
        "LitServe, no batches": Rival(rival_server(litserve, "/health", BATCH="1"), forms, lambda answer: answer["label"]),
        "BentoML": Rival(rival_server(bentoml, "/readyz"), forms, lambda answer: answer[0]["label"]),  # a batch of one
    }


def _inference(picture: bytes) -> bytes:
    """A picture as BYTES, which the Open Inference Protocol has preceded by their length."""
    return load.inference("digits", {"name": "picture", "shape": [1, 1], "datatype": "BYTES"}, pack("<I", len(picture)) + picture)


def _answer(server: Server, request: bytes) -> Any:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        answer = HTTPResponse(connection)
        answer.begin()
        return json.load(answer)


def _measure_load(name: str, server: Server, requests: list[bytes], seconds: float) -> Load:
    result = load.send_load(server.port, requests, CONCURRENCY, seconds)
    if result.failed:
        raise SystemExit(f"{result.failed} of {result.requests} requests failed at {name}")
    return result


def _versions(python: Path) -> str:
    script = f"from importlib.metadata import version; print(*(f'{{name}} {{version(name)}}' for name in {PACKAGES}), sep=', ')"
    return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


def _rate(loads: list[Load]) -> float:
    return median(each.rate for each in loads)


if __name__ == "__main__":
    main()
