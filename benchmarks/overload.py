"""Sends a server twice what it can do, for a minute each: requests that wait for the model, and requests that wait to be decoded.

`python -m benchmarks.overload`; `tests/service/test_load.py` is a short form of it. Some requests are answered and wait no
longer than CAPSERVE_MAX_WAIT, the others are refused at once, and memory stays as it was.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from benchmarks.load import inference, send_load
from benchmarks.server import ROOT, SHIPPED, Server, capserve
from benchmarks.serving import CONCURRENCY, multipart, samples
from service import bundle

MINUTE = 60.0
IMAGES = 64  # in a request: with fewer, this client would be the bottleneck and not the model
GROWTH_LIMIT = 32.0  # MB that a minute may add to a warm process
REFUSAL_LIMIT = 0.1  # seconds for a refusal, at the median
ANSWER_LIMIT = 1.5  # seconds for an answer, at the 99th percentile: one of waiting, and what comes after it


@dataclass
class Overload:
    """What became of requests that were sent independently of each other: seconds by status, and memory in MB meanwhile."""

    seconds: dict[int, list[float]] = field(default_factory=lambda: {200: [], 503: []})
    others: Counter[str] = field(default_factory=Counter)
    memory: list[float] = field(default_factory=list)


def main() -> int:
    scans = [multipart("/predict", scan) for scan in samples(bundle.read(ROOT / "tests/bundles/tiny")).scans]
    passed = [_withstands_overload(f"tensors of {IMAGES} pictures", [_tensors()]), _withstands_overload("scans", scans)]
    print("reached" if all(passed) else f"MISSED: nothing but 200 and 503, served within {ANSWER_LIMIT} s, "
          f"refused within {REFUSAL_LIMIT} s, no more than {GROWTH_LIMIT:g} MB")  # fmt: skip
    return 0 if all(passed) else 1


def _withstands_overload(name: str, requests: Sequence[bytes]) -> bool:
    with capserve(bundle.read(SHIPPED), "auto") as server:
        send_load(server.port, requests, CONCURRENCY, 2)  # to warm it up
        capacity = send_load(server.port, requests, 6, 5).rate  # enough clients to fill it, and few enough that none is refused
        overload = asyncio.run(_overload(server, requests, 2 * capacity, MINUTE))
    served, refused = overload.seconds[200], overload.seconds[503]
    if min(len(served), len(refused)) < 2:
        print(f"{name}: {len(served)} served, {len(refused)} refused, others {dict(overload.others)}")
        return False
    growth = max(overload.memory[len(overload.memory) // 4 :]) - overload.memory[len(overload.memory) // 4]
    p99, median_refusal = quantiles(served, n=100)[98], median(refused)
    print(f"{name}: capacity {capacity:.1f} requests/s; asked for twice that for {MINUTE:g} s")
    print(f"  served   {len(served) / MINUTE:.1f}/s, median {median(served):.3f} s, p99 {p99:.3f} s")
    print(f"  refused  {len(refused) / MINUTE:.1f}/s, median {median_refusal:.4f} s, p99 {quantiles(refused, n=100)[98]:.4f} s")
    print(f"  others   {dict(overload.others) or 'none'}")
    print(f"  memory   {overload.memory[-1]:.0f} MB, {growth:.1f} MB more than after the first quarter", flush=True)
    enough = len(served) > 0.6 * capacity * MINUTE
    return not overload.others and enough and p99 < ANSWER_LIMIT and median_refusal < REFUSAL_LIMIT and growth < GROWTH_LIMIT


def _tensors() -> bytes:
    """An Open Inference Protocol request of many pictures, which is little work for the sender."""
    tensor = {"name": "images", "shape": [IMAGES, 1, 28, 28], "datatype": "FP32"}
    return inference("compact", tensor, bytes(IMAGES * 28 * 28 * 4), "lengths")


async def _overload(server: Server, requests: Sequence[bytes], rate: float, seconds: float) -> Overload:
    overload, tasks, began = Overload(), set[asyncio.Task[None]](), time.perf_counter()
    sent = 0
    while (now := time.perf_counter() - began) < seconds:
        while sent < now * rate:
            task = asyncio.create_task(_send_request(server.port, requests[sent % len(requests)], overload))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        if len(overload.memory) < now:
            overload.memory.append(server.resident_megabytes())
        await asyncio.sleep(0.002)
    await asyncio.gather(*tasks)
    return overload


async def _send_request(port: int, raw: bytes, overload: Overload) -> None:
    """One request on a connection of its own, as independent clients send it."""
    began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        overload.others[type(error).__name__] += 1
        return
    status = int(head.split()[1])
    if status == 200 or (status == 503 and b"retry-after: " in head):
        overload.seconds[status].append(time.perf_counter() - began)
    else:
        overload.others[str(status)] += 1


if __name__ == "__main__":
    sys.exit(main())
