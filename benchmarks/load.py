"""HTTP load from a process of its own: wrk where it is installed, otherwise this file run as a program.

Both keep `concurrency` connections busy with requests that are ready to send, one after the other on each.

`python -m benchmarks.load` gives a server twice what it can do, for a minute: `tests/service/test_load.py`, at length.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

WRK = shutil.which("wrk")
SCRIPT = """
local requests, at = {}, 0
function init(args)
  for _, path in ipairs(args) do
    local file = io.open(path, "rb")
    table.insert(requests, file:read("*a"))
    file:close()
  end
end
function request()
  at = at % #requests + 1
  return requests[at]
end
function done(summary, latency)
  local e = summary.errors
  io.write(string.format('\\nRESULT {"requests": %d, "seconds": %f, "failed": %d, "p50": %f, "p99": %f}\\n', summary.requests,
    summary.duration / 1e6, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50) / 1e6, latency:percentile(99) / 1e6))
end
"""


class Load(NamedTuple):
    rate: float  # answers a second
    p50: float  # seconds
    p99: float
    requests: int
    failed: int  # answers other than 2xx, and none


def request(path: str, content_type: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def put(port: int, requests: Sequence[bytes], concurrency: int, seconds: float) -> Load:
    with tempfile.TemporaryDirectory() as work:
        files = []
        for number, raw in enumerate(requests):
            file = Path(work) / str(number)
            file.write_bytes(raw)
            files.append(str(file))
        script = Path(work) / "script.lua"
        script.write_text(SCRIPT)
        if WRK:
            command = [
                WRK,
                "-t1",
                f"-c{concurrency}",
                f"-d{seconds:.0f}s",
                f"-s{script}",
                f"http://127.0.0.1:{port}/",
                "--",
                *files,
            ]
        else:
            command = [sys.executable, __file__, str(port), str(concurrency), str(seconds), *files]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    return Load(found["requests"] / found["seconds"], found["p50"], found["p99"], found["requests"], found["failed"])


async def _client(port: int, requests: Sequence[bytes], until: float, latencies: list[float], failures: list[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(requests[sent % len(requests)])
        sent += 1
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        latencies.append(time.perf_counter() - began)
        if not head.startswith(b"http/1.1 2"):
            failures.append(head)
    writer.close()


async def _load(port: int, concurrency: int, seconds: float, requests: Sequence[bytes]) -> None:
    latencies: list[float] = []
    failures: list[bytes] = []
    began = time.perf_counter()
    until = began + seconds
    await asyncio.gather(*(_client(port, requests, until, latencies, failures) for _ in range(concurrency)))
    latencies.sort()
    found = {
        "requests": len(latencies),
        "seconds": time.perf_counter() - began,
        "failed": len(failures),
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[len(latencies) * 99 // 100],
    }
    print("RESULT", json.dumps(found))


ROOT = Path(__file__).resolve().parent.parent
MINUTE = 60.0
CONCURRENCY = 32
IMAGES = 64  # in a request: with fewer, this client and not the model would be what cannot keep up
FLAT = 32.0  # MB that a minute may add to a process which is warm
PROMPT = 0.1  # seconds for a refusal, at the median


@dataclass
class Overload:
    """What became of requests that did not wait for one another; seconds by status, and memory in MB while they came."""

    seconds: dict[int, list[float]] = field(default_factory=lambda: {200: [], 503: []})
    others: Counter[str] = field(default_factory=Counter)
    memory: list[float] = field(default_factory=list)


def overload() -> int:
    with _server() as (port, process):
        raw = _tensors()
        put(port, [raw], CONCURRENCY, 2)  # it is warm then
        capacity = put(port, [raw], 6, 5).rate  # enough to fill it, and few enough that nobody is refused
        found = asyncio.run(_overload(port, process.pid, raw, 2 * capacity, MINUTE))
    served, refused = found.seconds[200], found.seconds[503]
    growth = max(found.memory[len(found.memory) // 4 :]) - found.memory[len(found.memory) // 4]
    print(f"capacity {capacity:.1f} requests/s of {IMAGES} pictures; asked for twice that for {MINUTE:g} s")
    print(f"served   {len(served) / MINUTE:.1f}/s, median {median(served):.3f} s, p99 {quantiles(served, n=100)[98]:.3f} s")
    print(f"refused  {len(refused) / MINUTE:.1f}/s, median {median(refused):.4f} s, p99 {quantiles(refused, n=100)[98]:.4f} s")
    print(f"others   {dict(found.others) or 'none'}")
    print(f"memory   {found.memory[-1]:.0f} MB, {growth:.1f} MB more than after the first quarter")
    kept = not found.others and median(refused) < PROMPT and growth < FLAT and len(served) > 0.6 * capacity * MINUTE
    print("reached" if kept else f"MISSED: nothing but 200 and 503, refusals within {PROMPT} s, no more than {FLAT:g} MB")
    return 0 if kept else 1


@contextmanager
def _server() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The shipped default."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | {"CAPSERVE_PORT": str(port), "CAPSERVE_LOG_LEVEL": "error"}
    process = subprocess.Popen([sys.executable, "-m", "service", "serve"], cwd=ROOT, env=environment)
    try:
        while not _ready(port):
            if process.poll() is not None:
                raise SystemExit("capserve did not start")
            time.sleep(0.05)
        yield port, process
    finally:
        process.terminate()
        process.wait(40)


def _ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return connection.recv(100).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _tensors() -> bytes:
    """A request of many pictures for the Open Inference Protocol, which is little work for whoever sends it."""
    data = {"binary_data_size": IMAGES * 28 * 28 * 4}
    tensor = {"name": "images", "shape": [IMAGES, 1, 28, 28], "datatype": "FP32", "parameters": data}
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "lengths"}]}).encode()
    raw = request("/v2/models/compact/infer", "application/octet-stream", head + bytes(data["binary_data_size"]))
    return raw.replace(b"\r\n\r\n", f"\r\nInference-Header-Content-Length: {len(head)}\r\n\r\n".encode(), 1)


async def _overload(port: int, pid: int, raw: bytes, rate: float, seconds: float) -> Overload:
    found, asked, began = Overload(), set[asyncio.Task[None]](), time.perf_counter()
    sent = 0
    while (now := time.perf_counter() - began) < seconds:
        while sent < now * rate:
            task = asyncio.create_task(_ask(port, raw, found))
            asked.add(task)
            task.add_done_callback(asked.discard)
            sent += 1
        if len(found.memory) < now:
            status = Path(f"/proc/{pid}/status").read_text()
            found.memory.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
        await asyncio.sleep(0.002)
    await asyncio.gather(*asked)
    return found


async def _ask(port: int, raw: bytes, found: Overload) -> None:
    """One request on a connection of its own, as the world's clients come."""
    began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        found.others[type(error).__name__] += 1
        return
    status = int(head.split()[1])
    if status == 200 or (status == 503 and b"retry-after: " in head):
        found.seconds[status].append(time.perf_counter() - began)
    else:
        found.others[str(status)] += 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(overload())
    port, concurrency, seconds, *files = sys.argv[1:]
    asyncio.run(_load(int(port), int(concurrency), float(seconds), [Path(file).read_bytes() for file in files]))
