"""Compares CUDA with the CPU in one run on a machine with a GPU: the shipped encoders, then the service on each device.

    python -m benchmarks.cuda

What a graph computes on CUDA is compared with float32 on the CPU, on altered examples of its bundle. Rates are those of the
service's own sessions, copies to the GPU and back included: medians of rounds in which all run in turn.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks import rates
from benchmarks.server import ROOT, SHIPPED, capserve
from benchmarks.serving import measure_load, samples
from service import bundle, sessions
from service.bundle import ENCODER, Array, Bundle
from service.errors import StartError
from service.manifest import Variant
from service.process import cpus
from service.runtime import Session
from service.settings import WantedDevice

MODELS, SERVED = ("compact", "paper", "overlap"), ("compact", "paper")
COMPARED = 256  # pictures
BATCHES = (1, 16, 64)  # the largest is also the service's limit
CLIENTS = (1, 32, 128)
WARM_UP, SECONDS = 1, 3  # seconds of load


class Way(NamedTuple):
    """How encoders run."""

    device: WantedDevice
    cuda_graphs: bool = False
    variant: Variant = "fp32"


CPU = Way("cpu")
WAYS = {"cpu": CPU, "cpu, int8": CPU._replace(variant="int8"), "cuda": Way("cuda"), "cuda, graphs": Way("cuda", cuda_graphs=True)}


def main() -> None:
    try:
        _opened(bundle.read(SHIPPED), WAYS["cuda"])
    except StartError as error:
        raise SystemExit(str(error)) from None
    for model in MODELS:
        compare_encoders(bundle.read(SHIPPED.with_name(model)))
    pictures = samples(bundle.read(ROOT / "tests/bundles/tiny")).pictures
    for name, way in WAYS.items():
        for model in SERVED:
            measure_service(name, way, bundle.read(SHIPPED.with_name(model)), pictures)


def compare_encoders(model_bundle: Bundle) -> None:
    opened = {name: _opened(model_bundle, way) for name, way in WAYS.items()}
    images = _images(model_bundle)
    expected = opened["cpu"].run(images)[0]
    for name, session in opened.items():
        lengths = session.run(images)[0]
        difference, renamed = np.abs(lengths - expected).max(), (lengths.argmax(1) != expected.argmax(1)).sum()
        print(
            f"{model_bundle.manifest.name} on {name}: lengths {difference:.2g} off at most, "
            f"{renamed} of {COMPARED} named otherwise"
        )
    for batch in BATCHES:
        results = rates.in_turn({name: partial(session.run, images[:batch]) for name, session in opened.items()})
        columns = [f"{name} {median(each) * batch:.0f}, {1e3 / median(each):.3f} ms" for name, each in results.items()]
        print(f"{model_bundle.manifest.name}, images/s in batches of {batch}: {'; '.join(columns)}", flush=True)


def measure_service(name: str, way: Way, model_bundle: Bundle, pictures: list[bytes]) -> None:
    server = capserve(model_bundle, way.variant)
    settings = {"DEVICE": way.device, "CUDA_GRAPHS": str(way.cuda_graphs), "MAX_BATCH": str(BATCHES[-1])}
    server.environment |= {f"CAPSERVE_{key}": value for key, value in settings.items()}
    with server:
        print(f"{model_bundle.manifest.name}, served on {name}: ready after {server.seconds_to_ready:.1f} s")
        for clients in CLIENTS:
            measure_load(server, pictures, WARM_UP, clients)
            result = measure_load(server, pictures, SECONDS, clients)
            columns = f"{result.rate:.0f} requests/s, p50 {result.p50 * 1e3:.2f} ms, p99 {result.p99 * 1e3:.2f} ms"
            print(f"  {clients:3} clients: {columns}")
        print(f"  {server.resident_megabytes():.0f} MB", flush=True)


def _opened(model_bundle: Bundle, way: Way) -> Session:
    path = model_bundle.encoder(way.variant)
    device = sessions.device(way.device, cpus.available(), cuda_memory=2, cuda_graphs=way.cuda_graphs, probe=path)
    return device.open(path, ENCODER, model_bundle.manifest)


def _images(model_bundle: Bundle) -> Array:
    """A bundle's examples, brighter or darker and with a little noise."""
    random = np.random.default_rng(0)
    examples = model_bundle.example("fp32").images
    picked = examples[random.integers(len(examples), size=COMPARED)]
    changed = picked * random.uniform(0.7, 1, (COMPARED, 1, 1, 1)) + random.uniform(0, 0.1, picked.shape)
    return np.clip(changed, 0, 1).astype(np.float32)


if __name__ == "__main__":
    main()
