"""CUDA beside the CPU in one run, on a machine with a GPU: encoders of the shipped bundles, then the service with each device.

    python -m benchmarks.cuda

What a graph computes on CUDA is compared with the CPU's float32, on changed examples of its bundle. Rates are of the service's
own sessions, copies to the GPU and back included: medians of rounds in which all take their turn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

import numpy as np

from benchmarks import load
from benchmarks.server import SHIPPED, Server, capserve
from benchmarks.serving import multipart, samples
from service import bundle, sessions
from service.bundle import ENCODER, Array, Bundle
from service.manifest import Variant
from service.process import cpus
from service.runtime import Session

ROUNDS, SECONDS = 3, 0.3
BATCHES = (1, 16, 64)
DEVICES = {"cpu": {"DEVICE": "cpu"}, "cuda": {"DEVICE": "cuda"}, "cuda, graphs": {"DEVICE": "cuda", "CUDA_GRAPHS": "1"}}
CLIENTS = (1, 32, 128)
SERVED, OTHERS = ("compact", "paper"), ("overlap",)


def main() -> None:
    for model in (*SERVED, *OTHERS):
        encoders(bundle.read(SHIPPED.with_name(model)))
    for name, settings in DEVICES.items():
        serve(name, settings)


def encoders(made: Bundle) -> None:
    opened = {name: _opened(made, "cuda" in name, "graphs" in name, "fp32") for name in DEVICES}
    if "int8" in made.manifest.variants:
        opened["cpu, int8"] = _opened(made, False, False, "int8")
    images = _images(made, 256)
    expected = opened["cpu"].run(images)[0]
    for name, session in opened.items():
        found = session.run(images)[0]
        difference = np.abs(found - expected)
        named = int((found.argmax(1) != expected.argmax(1)).sum())
        print(
            f"{made.manifest.name} {name}: lengths {difference.max():.2g} off at most, {named} of {len(images)} named otherwise"
        )
    for batch in BATCHES:
        rates = _rates(opened, images[:batch])
        said = [f"{name} {median(each):.0f}, {1e3 * batch / median(each):.3f} ms" for name, each in rates.items()]
        print(f"{made.manifest.name}, images/s in batches of {batch}: {'; '.join(said)}", flush=True)


def serve(name: str, settings: Mapping[str, str]) -> None:
    for model in SERVED:
        server = capserve(bundle.read(SHIPPED.with_name(model)), "auto")
        server.environment |= {f"CAPSERVE_{key}": value for key, value in settings.items()} | {"CAPSERVE_MAX_BATCH": "64"}
        with server:
            print(f"{model}, served on {name}: ready after {server.seconds_to_ready:.1f} s")
            for clients in CLIENTS:
                found = _load(server, clients)
                said = f"{found.rate:.0f} requests/s, p50 {found.p50 * 1e3:.2f} ms, p99 {found.p99 * 1e3:.2f} ms"
                print(f"  {clients:3} clients: {said}")
            print(f"  {server.resident_megabytes():.0f} MB", flush=True)


def _load(server: Server, clients: int) -> load.Load:
    pictures = samples(bundle.read(SHIPPED.parents[1] / "tests/bundles/tiny")).pictures
    requests = [multipart("/predict?reconstruct=false", picture) for picture in pictures]
    load.put(server.port, requests, clients, 1)
    found = load.put(server.port, requests, clients, 3)
    if found.failed:
        raise SystemExit(f"{found.failed} of {found.requests} requests failed on {' '.join(server.command)}")
    return found


def _opened(made: Bundle, cuda: bool, graphs: bool, variant: Variant) -> Session:
    path = made.encoder(variant)
    device = sessions.device("cuda" if cuda else "cpu", cpus.available(), cuda_memory=2, cuda_graphs=graphs, probe=path)
    return device.open(path, ENCODER, made.manifest)


def _images(made: Bundle, count: int) -> Array:
    """A bundle's examples, brighter or darker and with a little noise."""
    random = np.random.default_rng(0)
    examples = made.example("fp32").images
    picked = examples[random.integers(len(examples), size=count)]
    changed = picked * random.uniform(0.7, 1, (count, 1, 1, 1)) + random.uniform(0, 0.1, picked.shape)
    return np.clip(changed, 0, 1).astype(np.float32)


def _rates(opened: Mapping[str, Session], images: Array) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in opened}
    for session in opened.values():
        for _ in range(3):  # CUDA graphs are recorded
            session.run(images)
    for _ in range(ROUNDS):
        for name, session in opened.items():
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < SECONDS:
                session.run(images)
                count += len(images)
            rates[name].append(count / (time.perf_counter() - began))
    return rates


if __name__ == "__main__":
    main()
