"""HTTP load from a process of its own: wrk if it is installed, otherwise this file run as a program.

Both keep `concurrency` connections busy with prepared requests, one after the other on each.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    failed: int  # answers other than 2xx; with wrk also connections and requests that failed or timed out


def request(path: str, content_type: str, body: bytes, *headers: str) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        *headers,
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def inference(model: str, tensor: dict[str, Any], data: bytes, *outputs: str) -> bytes:
    """An Open Inference Protocol request for these outputs, or for all; its one input follows the JSON in binary."""
    content: dict[str, Any] = {"inputs": [tensor | {"parameters": {"binary_data_size": len(data)}}]}
    if outputs:
        content["outputs"] = [{"name": name} for name in outputs]
    head = json.dumps(content).encode()
    length = f"Inference-Header-Content-Length: {len(head)}"
    return request(f"/v2/models/{model}/infer", "application/octet-stream", head + data, length)


def send_load(port: int, requests: Sequence[bytes], concurrency: int, seconds: float) -> Load:
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
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    return Load(result["requests"] / result["seconds"], result["p50"], result["p99"], result["requests"], result["failed"])


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
    result = {
        "requests": len(latencies),
        "seconds": time.perf_counter() - began,
        "failed": len(failures),
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[len(latencies) * 99 // 100],
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    port, concurrency, seconds, *files = sys.argv[1:]
    asyncio.run(_load(int(port), int(concurrency), float(seconds), [Path(file).read_bytes() for file in files]))
