"""On Ray Serve the same requests get the same answers: two replicas on two nodes, behind Ray's proxy, started by `serve run`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from service import bundle
from tests.service.bundles import TINY, renewed
from tests.service.conftest import drawn, encoded, wait_until_ready
from tests.service.processes import ROOT, free_port, process
from tests.waiting import until

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install '.[ray]'"),
]

KEY = {"X-API-Key": "sesame"}
VARYING = {"x-request-id", "server-timing", "date", "server"}  # headers that differ by nature
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # with the usual 5, a busy machine's proxy would be killed
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",  # or the proxy would ask the other node only when its own is full
}


class Cluster:
    """Two nodes, and where their one proxy listens."""

    def __init__(self, address: str, url: str) -> None:
        self.address, self.url = address, url

    def run(self, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
        """Runs `serve run`, which ends when all replicas are at work."""
        with self.running(*arguments, stderr=subprocess.PIPE, **settings) as popen:
            _, said = popen.communicate(timeout=300)
        return subprocess.CompletedProcess(popen.args, popen.returncode, stderr=said.decode())

    def running(self, *arguments: str, stderr: Any, **settings: object) -> subprocess.Popen[bytes]:
        command = [Path(sys.executable).parent / "serve", "run", "--non-blocking", "--address", self.address]
        values = {f"CAPSERVE_{name.upper()}": str(value) for name, value in settings.items()}
        return subprocess.Popen(
            [*command, "service.ray_app:app", *arguments], cwd=ROOT, env=os.environ | RAY | values, stderr=stderr
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    port = free_port()
    command = [sys.executable, "-m", "tests.service.ray_cluster", str(port)]
    popen = subprocess.Popen(command, cwd=ROOT, env=os.environ | RAY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert popen.stdin is not None
    assert popen.stdout is not None
    try:
        address = popen.stdout.readline().strip()
        assert address, "Ray did not start; it has said why on standard error"
        yield Cluster(address, f"http://127.0.0.1:{port}")
    finally:
        popen.stdin.close()
        popen.wait(60)
        popen.stdout.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(TINY, folder / "tiny")
    return folder


NOISE = Image.effect_noise((300, 300), 80)
SETTINGS = {"api_key": "sesame", "max_batch": 1, "max_queue": 4, "log_level": "error"}
SCALE = ("min_replicas=2", "max_replicas=2", "num_cpus=0.3")


@pytest.fixture(scope="module")
def client(cluster: Cluster, folder: Path) -> Iterator[httpx.Client]:
    done = cluster.run(*SCALE, models=folder, **SETTINGS)
    assert done.returncode == 0, done.stderr
    with httpx.Client(base_url=cluster.url, headers=KEY, timeout=60) as client:
        wait_until_ready(client)
        yield client


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[httpx.Client]:
    with process(models=folder, **SETTINGS) as server, httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
        yield client


def series(client: httpx.Client, name: str, label: str = "") -> dict[str, float]:
    """Returns a metric by replica, summed over its other labels."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(name) and label in line:
            replica = line.partition('replica="')[2].partition('"')[0]
            found[replica] = found.get(replica, 0) + float(line.rpartition(" ")[2])
    return found


def answer(client: httpx.Client, method: str, path: str, **what: Any) -> tuple[int, bytes, list[tuple[str, str]]]:
    response = client.request(method, path, **what)
    headers = [(name, value) for name, value in response.headers.multi_items() if name not in VARYING]
    return response.status_code, response.content, sorted(headers)


def requests(token: str) -> list[tuple[str, str, dict[str, Any]]]:
    seven, noise = encoded(drawn("7")), encoded(NOISE)
    png = {"Content-Type": "image/png"}
    pixels = {"name": "images", "shape": [1, 1, 28, 28], "datatype": "FP32", "data": [0.5] * 784}
    return [
        ("GET", "/", {}),
        ("GET", "/docs", {"headers": {"Host": "digits"}}),  # which names the address it was found at
        ("GET", "/openapi.json", {}),
        ("GET", "/healthz", {}),
        ("GET", "/readyz", {}),
        ("GET", "/models", {}),
        ("HEAD", "/models", {}),
        ("GET", "/models/tiny", {}),
        ("GET", "/models/none", {}),
        ("GET", "/models", {"headers": {"X-API-Key": "wrong"}}),
        ("POST", "/predict", {"content": seven, "headers": png}),
        ("POST", "/predict?input=true", {"content": noise, "headers": png}),
        ("POST", "/predict?normalise=none", {"content": encoded(drawn("1", 28)), "headers": png}),
        ("POST", "/predict", {"files": {"file": seven}}),
        ("POST", "/predict", {"json": {"image": b64encode(seven).decode()}}),
        ("POST", "/predict", {"content": b"not a picture", "headers": png}),
        ("POST", "/predict", {"content": b"", "headers": png}),
        ("POST", "/predict", {"content": bytes(11 << 20), "headers": png}),
        ("POST", "/predict", {"content": (bytes(1 << 16) for _ in range(11 << 4)), "headers": png}),
        ("POST", "/predict/batch", {"files": [("file", seven), ("file", noise)]}),
        ("POST", "/v2/models/tiny/infer", {"json": {"inputs": [pixels]}}),
        ("GET", f"/reconstruct?pose={token}&dim=1&delta=0.1", {}),
        ("GET", f"/reconstruct?pose={token}", {"headers": {"Accept": "application/json"}}),
        ("GET", "/reconstruct?dim=99&delta=0.1", {}),
        ("GET", "/reconstruct/sweep?label=7", {}),
        ("GET", f"/reconstruct/morph?from={token}&to={token}", {}),
        ("GET", "/reconstruct?label=7", {"headers": {"Accept": "text/html"}}),
        ("DELETE", "/models", {}),
        ("GET", "/nowhere", {}),
    ]


def test_every_answer_equals_the_plain_servers(client: httpx.Client, plain: httpx.Client) -> None:
    token = plain.post("/predict", files={"file": encoded(drawn("7"))}).json()["objects"][0]["pose"]
    for _ in range(3):  # whichever replica answers
        for (method, path, what), (_, _, same) in zip(requests(token), requests(token), strict=True):  # a body can be read once
            assert answer(client, method, path, **what) == answer(plain, method, path, **same), (method, path)
    asked = series(client, "capserve_requests_total")
    assert len(asked) == 2
    assert min(asked.values()) > 3  # both nodes have answered


def test_an_answer_has_one_request_id_and_its_timing(client: httpx.Client) -> None:
    response = client.get("/models", headers={"X-Request-ID": "mine-1"})
    assert response.headers.get_list("x-request-id") == ["mine-1"]
    assert "total;dur=" in response.headers["server-timing"]


def test_an_unchanged_drawing_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/reconstruct?label=7")
    again = client.get("/reconstruct?label=7", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_request_with_a_body_that_offers_an_upgrade_gets_400(client: httpx.Client) -> None:
    """As every POST of Java's HttpClient does. Ray's proxy would take the body for the next request."""
    body = b"GET /readyz HTTP/1.1\r\nHost: digits\r\n\r\n"
    head = b"POST /predict HTTP/1.1\r\nHost: digits\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        time.sleep(0.3)
        connection.sendall(body)
        seen = b"".join(iter(partial(connection.recv, 1 << 16), b""))  # until it is closed
    assert seen.startswith(b"HTTP/1.1 400 ")
    assert b"Java's HttpClient" in seen
    assert seen.count(b"HTTP/1.1") == 1
    assert client.get("/models", headers={"Connection": "Upgrade", "Upgrade": "h2c"}).status_code == 200


def test_full_replicas_answer_503_with_retry_after(client: httpx.Client) -> None:
    async def crowd() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=client.base_url, headers=KEY, timeout=60, limits=limits) as crowded:
            return await asyncio.gather(*(crowded.post("/predict", files={"file": encoded(NOISE)}) for _ in range(100)))

    answers = asyncio.run(crowd())
    assert {each.status_code for each in answers} == {200, 503}
    assert {each.headers["retry-after"] for each in answers if each.status_code == 503} == {"1"}
    assert client.post("/predict", files={"file": encoded(NOISE)}).status_code == 200


def test_work_for_clients_that_left_is_not_done(client: httpx.Client) -> None:
    large = encoded(Image.effect_noise((3000, 3000), 80))

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=client.base_url, headers=KEY, timeout=60) as leaving:
            asking = [asyncio.create_task(leaving.post("/predict", files={"file": large})) for _ in range(8)]
            while not await asyncio.to_thread(lambda: sum(series(client, "capserve_body_bytes").values())):
                await asyncio.sleep(0.05)  # the proxy reads bodies to the end before a replica sees any
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    before = sum(series(client, "capserve_batch_images_count").values())
    asyncio.run(asyncio.wait_for(leave(), 60))
    until(lambda: sum(series(client, "capserve_requests_total", 'status="499"').values()) > 0, seconds=60)
    assert sum(series(client, "capserve_batch_images_count").values()) - before < 8


def test_a_new_version_goes_live_on_every_replica(client: httpx.Client, folder: Path) -> None:
    renewed(folder / "tiny", "another")
    version = bundle.read(folder / "tiny").manifest.version
    assert client.post("/models/reload").json() == {"models": {"tiny": "replaced"}}
    assert {client.get("/models").json()["models"][0]["version"] for _ in range(20)} == {version}


def test_an_update_loses_no_request(client: httpx.Client, cluster: Cluster, folder: Path) -> None:
    before, stop, statuses = set(series(client, "capserve_ready")), threading.Event(), []

    def ask() -> None:
        with httpx.Client(base_url=cluster.url, headers=KEY, timeout=60) as asking:
            while not stop.is_set():
                statuses.append(asking.post("/predict", files={"file": encoded(NOISE)}).status_code)

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(ask) for _ in range(3)]
        try:
            done = cluster.run("min_replicas=2", "max_replicas=2", "num_cpus=0.2", models=folder, **SETTINGS)
        finally:
            stop.set()
    for each in clients:
        each.result()  # raises if a connection was cut, which is a lost request
    assert done.returncode == 0, done.stderr
    after = series(client, "capserve_ready")
    assert before.isdisjoint(after), "expected other replicas, found the same"
    assert list(after.values()) == [1, 1]
    assert len(statuses) > 10
    assert set(statuses) == {200}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "tiny")
    (tmp_path / "tiny" / "decoder.onnx").write_bytes(b"broken")
    return tmp_path


def test_an_update_to_a_broken_bundle_fails_while_the_old_one_serves(
    client: httpx.Client, cluster: Cluster, broken: Path
) -> None:
    refused(client, cluster, "decoder.onnx: expected", *SCALE, models=broken)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="a GPU may be here; this is about one that does not work")
def test_a_gpu_that_does_not_work_is_not_replaced_by_the_cpu(client: httpx.Client, cluster: Cluster, folder: Path) -> None:
    refused(client, cluster, "CUDA", *SCALE, "num_gpus=0.25", models=folder)


def refused(client: httpx.Client, cluster: Cluster, sentence: str, *arguments: str, models: Path) -> None:
    """Runs an update that must fail with this sentence, while the old replicas keep answering."""
    said = models.parent / "said.txt"
    with said.open("wb") as file, cluster.running(*arguments, models=models, stderr=file) as updating:
        try:
            until(lambda: sentence in said.read_text(), seconds=150)
            statuses = {client.post("/predict", files={"file": encoded(NOISE)}).status_code for _ in range(10)}
            assert statuses == {200}
        finally:
            updating.kill()


def test_serve_run_fails_and_names_a_wrong_setting_or_argument(cluster: Cluster) -> None:
    for arguments, settings, sentence in (
        (["max_replica=4"], {}, "max_replica"),
        (["min_replicas=3", "max_replicas=2"], {}, "max_replicas"),
        ([], {"max_batch": 0}, "max_batch"),
    ):
        done = cluster.run(*arguments, **settings)
        assert done.returncode != 0
        assert sentence in done.stderr


@pytest.mark.filterwarnings("ignore")  # Ray's own, of pydantic
def test_metrics_of_many_replicas_are_written_in_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from service import ray_app

    async def found(*_: Any, **__: Any) -> list[Any]:
        return []

    async def own() -> bytes:
        raise AssertionError("all are asked, this one among them")

    monkeypatch.setattr(ray_app, "_broadcast", found)
    monkeypatch.setattr(ray_app, "exposition", lambda _: threading.current_thread().name.encode())
    assert asyncio.run(ray_app.Replicas().metrics(own)) == b"own"
