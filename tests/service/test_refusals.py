from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator

import httpx
import pytest

from service.app import create_app
from service.engine import CapsNet
from service.errors import Busy
from service.web import refusals
from service.web.refusals import LONGEST_DELAY, RATE, Refusals
from tests.service.conftest import settings

LARGE = 8 << 20  # bytes


def test_refusals_beyond_the_rate_are_delayed_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, held = 100.0, []

    async def sleep(seconds: float) -> None:
        held.append(seconds)

    async def turns(count: int) -> list[float]:
        held.clear()
        for _ in range(count):
            await refused.turn()
        return list(held)

    monkeypatch.setattr(refusals.time, "monotonic", lambda: now)
    monkeypatch.setattr(refusals.asyncio, "sleep", sleep)
    refused = Refusals()
    many = asyncio.run(turns(2 * RATE))
    assert len(many) == 2 * RATE - 1  # the first goes out at once
    assert many[:3] == pytest.approx([1 / RATE, 2 / RATE, 3 / RATE])
    assert max(many) == many[-1] == LONGEST_DELAY
    now += LONGEST_DELAY + 2 / RATE
    assert asyncio.run(turns(1)) == []


@pytest.mark.parametrize("refusing", ["crew", "bodies"], ids=["by its route", "before routing"])
def test_a_delayed_refusal_holds_no_memory(refusing: str, nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise none would be left for others' pictures."""

    async def body() -> AsyncIterator[bytes]:
        for _ in range(LARGE >> 20):
            yield bytes(1 << 20)

    def busy(pictures: int = 1) -> None:
        raise Busy("too many pictures wait", refusing)

    async def refused() -> tuple[httpx.Response, float]:
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            while not service.catalogue.ready:
                await asyncio.sleep(0.01)
            before = tracemalloc.get_traced_memory()[0]
            service.crew._jobs = 1
            service.refusals._next = time.monotonic() + 60
            began = time.monotonic()
            asking = asyncio.create_task(client.post("/predict", content=body(), headers={"Content-Type": "image/png"}))
            await asyncio.sleep(0.6 * LONGEST_DELAY)
            assert not asking.done()
            assert service.bodies.held == 0
            assert tracemalloc.get_traced_memory()[0] - before < LARGE / 2
            return await asking, time.monotonic() - began

    app = create_app(settings(), nets)
    service = app.state.service
    monkeypatch.setattr(getattr(service, refusing), "admit", busy)
    tracemalloc.start()
    try:
        answer, seconds = asyncio.run(refused())
    finally:
        tracemalloc.stop()
    assert answer.status_code == 503
    assert "too many pictures wait" in answer.text
    assert seconds >= LONGEST_DELAY


def test_a_busy_server_still_tells_probes_that_it_is_ready(nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise whatever watches it would take it out of rotation just when it is needed."""

    def busy(pictures: int = 1) -> None:
        raise Busy("others' bodies fill the memory", "bodies")

    app = create_app(settings(), nets)
    monkeypatch.setattr(app.state.service.bodies, "admit", busy)
    version = nets["tiny"].manifest.version
    probes = ["/healthz", "/readyz", "/v2/health/ready", "/v2/models/tiny/ready", f"/v2/models/tiny/versions/{version}/ready"]

    async def asked() -> dict[str, int]:
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            while not app.state.service.catalogue.ready:
                await asyncio.sleep(0.01)
            return {path: (await client.get(path)).status_code for path in (*probes, "/v2/models/tiny")}

    assert asyncio.run(asked()) == dict.fromkeys(probes, 200) | {"/v2/models/tiny": 503}
