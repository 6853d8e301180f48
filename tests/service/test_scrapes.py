"""Scrapes take little of the time that pictures need, however frequent they are, and each sees all that happened before it."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.engine import CapsNet
from service.metrics import Metrics
from service.scrapes import LONGEST_REST, REST, Scrapes
from tests.service.conftest import serving, settings


class Writer:
    """Writes numbered texts, which take a moment each, and records when each began and ended."""

    def __init__(self, fails: int = 0) -> None:
        self.spans: list[tuple[float, float]] = []
        self._fails = fails

    async def write(self) -> bytes:
        began = time.monotonic()
        await asyncio.sleep(0.02)
        self.spans.append((began, time.monotonic()))
        if len(self.spans) == self._fails:
            raise OSError("the disk")
        return b"%d" % len(self.spans)


def test_scrapes_share_a_text_only_if_asked_before_it_is_begun() -> None:
    async def ask() -> None:
        writer = Writer()
        scrapes = Scrapes(writer.write)
        early = [asyncio.create_task(scrapes.text()) for _ in range(100)]
        await asyncio.sleep(0.01)
        late = [asyncio.create_task(scrapes.text()) for _ in range(100)]
        assert await asyncio.gather(*early, *late) == [b"1"] * 100 + [b"2"] * 100
        (_, first_ended), (second_began, _) = writer.spans
        assert second_began > first_ended  # one after the other, whenever they are asked for

    asyncio.run(ask())


def test_there_is_a_rest_between_two_texts() -> None:
    async def ask() -> None:
        writer = Writer()
        scrapes = Scrapes(writer.write)
        for _ in range(4):
            await scrapes.text()
        for (began, ended), (next_began, _) in zip(writer.spans, writer.spans[1:], strict=False):
            assert next_began - ended >= REST * (ended - began) * 0.9

    asyncio.run(ask())


def test_the_rest_after_a_slow_text_is_bounded() -> None:
    async def ask() -> None:
        async def slowly() -> bytes:
            await asyncio.sleep(LONGEST_REST / 2)
            return b""

        scrapes = Scrapes(slowly)
        await scrapes.text()
        async with asyncio.timeout(1.9 * LONGEST_REST):
            await scrapes.text()

    asyncio.run(ask())


def test_a_write_error_reaches_only_the_scrapes_that_waited_for_it() -> None:
    async def ask() -> None:
        scrapes = Scrapes(Writer(fails=1).write)
        met = await asyncio.gather(scrapes.text(), scrapes.text(), return_exceptions=True)
        assert [str(each) for each in met] == ["the disk"] * 2
        assert await scrapes.text() == b"2"

    asyncio.run(ask())


def test_a_cancelled_scrape_does_not_disturb_the_others() -> None:
    async def ask() -> None:
        scrapes = Scrapes(Writer().write)
        first, second = (asyncio.create_task(scrapes.text()) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        assert await second == b"1"

    asyncio.run(ask())


def test_the_event_loop_stays_free_while_metrics_are_written(nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, written = threading.Event(), threading.Event()

    def text(_: Metrics) -> bytes:
        begun.set()
        return b"written" if written.wait(10) else b"too late"

    monkeypatch.setattr(Metrics, "text", text)
    with serving(settings(), nets) as client, ThreadPoolExecutor() as pool:
        asked = pool.submit(client.get, "/metrics")
        assert begun.wait(10)
        assert client.get("/healthz").status_code == 200
        written.set()
        assert asked.result().text == "written"
