from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from service.app import create_app
from service.engine import CapsNet
from tests.service.conftest import serving, settings, wait_until_ready
from tests.service.test_metrics import samples
from tests.waiting import until


def test_a_started_server_is_live_and_ready(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"live": True}
    assert client.get("/readyz").json() == {"ready": True, "state": "ready"}


def test_a_warming_server_is_live_but_not_ready(nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, seven: bytes) -> None:
    warm = threading.Event()
    monkeypatch.setattr(CapsNet, "warm_up", lambda *_: warm.wait(10))
    with serving(settings(), nets, answers="/healthz") as client:
        assert client.get("/healthz").status_code == 200
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["state"]) == (503, "warming")
        for path in ("/v2/health/ready", "/v2/models/tiny/ready"):
            assert client.get(path).status_code == 503, path
        tensor = {"name": "images", "shape": [1, 1, 28, 28], "datatype": "FP32", "data": [0.0] * 784}
        for early in (
            client.post("/predict", files={"file": seven}),
            client.get("/reconstruct?label=1"),
            client.get("/openapi.json"),
            client.post("/v2/models/tiny/infer", json={"inputs": [tensor]}),
        ):
            assert early.status_code == 503
            assert early.headers["Retry-After"] == "1"
            assert "warming" in early.json()["detail"]
        assert samples(client)["capserve_rejections_total", "warming"] == 4  # which alerts refer to
        warm.set()
        wait_until_ready(client)


def test_liveness_fails_when_no_thread_can_be_started(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, seven: bytes
) -> None:
    start = threading.Thread.start

    def short_of_threads(thread: threading.Thread) -> None:
        if thread.name.startswith("runner-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", short_of_threads)
    with serving(settings(), nets, answers="/") as client:
        until(lambda: client.get("/healthz").status_code == 503)
        assert client.get("/readyz").json() == {"ready": False, "state": "failing"}
        assert client.get("/v2/models/tiny/ready").status_code == 503
        refused = client.post("/predict", files={"file": seven})
        assert refused.status_code == 503
        assert "this server must be restarted, ask another" in refused.json()["detail"]
        assert samples(client)["capserve_rejections_total", "failed"] == 1  # which alerts take for an error, not for a rollout


def test_a_worker_among_several_warms_up_before_it_listens(nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a worker that replaces a dead one would turn away requests that the others could answer."""
    warm = threading.Event()
    monkeypatch.setattr(CapsNet, "warm_up", lambda *_: warm.wait(10))
    app = create_app(settings(workers=2), nets)

    async def listen() -> bool:
        async with app.router.lifespan_context(app):  # a server listens once this is entered
            return app.state.service.catalogue.ready

    async def scenario() -> None:
        listening = asyncio.create_task(listen())
        await asyncio.sleep(0.2)
        assert not listening.done()
        warm.set()
        assert await listening

    asyncio.run(scenario())
