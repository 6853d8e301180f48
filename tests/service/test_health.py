from __future__ import annotations

import threading

import httpx
import pytest

from service.engine import CapsNet
from tests.service.conftest import serving, settings, wait_until_ready


def test_it_lives_and_is_ready(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"live": True}
    assert client.get("/readyz").json() == {"ready": True, "state": "ready"}


def test_it_lives_but_is_not_ready_while_it_warms_up(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, seven: bytes
) -> None:
    warm = threading.Event()
    monkeypatch.setattr(CapsNet, "warm_up", lambda *_: warm.wait(10))
    monkeypatch.setattr("tests.service.conftest.wait_until_ready", lambda client: _until_it_listens(client))
    with serving(settings(), nets) as client:
        assert client.get("/healthz").status_code == 200
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["state"]) == (503, "warming")
        for early in (client.post("/predict", files={"file": seven}), client.get("/reconstruct?label=1")):
            assert early.status_code == 503
            assert early.headers["Retry-After"] == "1"
            assert "warming" in early.json()["detail"]
        warm.set()
        wait_until_ready(client)


def _until_it_listens(client: httpx.Client) -> None:
    for _ in range(1000):
        try:
            client.get("/healthz")
            return
        except httpx.ConnectError:
            threading.Event().wait(0.01)
