"""A request's body counts as long as it is in memory, however the request ends: what is never released is lost to all others."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from service.app import create_app
from service.engine import CapsNet
from service.errors import Busy
from service.visits import Visit
from service.web.bodies import Bodies
from tests.service.conftest import settings
from tests.waiting import until_soon

Message = MutableMapping[str, Any]


def sending(*parts: Message) -> Callable[[], Awaitable[Message]]:
    """Makes the `receive` of a client that sends these messages and then waits."""
    left = list(parts)

    async def receive() -> Message:
        if not left:
            await asyncio.sleep(60)
        return left.pop(0)

    return receive


async def posted(
    app: FastAPI, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]], path: str = "/predict"
) -> None:
    head = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
    headers = [(b"host", b"here"), (b"content-type", b"image/png")]
    ends = {"scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "headers": headers, "state": {}}
    await app(head | ends, receive, send)


def with_app(nets: dict[str, CapsNet], scene: Callable[[FastAPI], Awaitable[None]]) -> None:
    async def run() -> None:
        app = create_app(settings(), nets)
        async with app.router.lifespan_context(app):
            await until_soon(lambda: app.state.service.catalogue.ready)
            await scene(app)

    asyncio.run(run())


def refers_to(each: object) -> list[object]:
    """Also what an error of Pydantic's refers to, which the garbage collector does not see in every version."""
    unseen = [told["input"] for told in each.errors()] if isinstance(each, ValidationError) else []
    return [*gc.get_referents(each), *unseen]


def test_a_body_is_released_when_its_answer_begins(nets: dict[str, CapsNet], seven: bytes) -> None:
    """It is not kept until a slow client has read the whole answer."""

    async def scene(app: FastAPI) -> None:
        held: list[tuple[str, int]] = []

        async def send(message: Message) -> None:
            held.append((message["type"], app.state.service.bodies.held))

        await posted(app, sending({"type": "http.request", "body": seven, "more_body": False}), send)
        assert held == [("http.response.start", 0), ("http.response.body", 0)]

    with_app(nets, scene)


def test_a_body_is_released_when_its_request_is_cancelled(nets: dict[str, CapsNet]) -> None:
    async def scene(app: FastAPI) -> None:
        async def send(message: Message) -> None:
            raise AssertionError(message)

        begins = sending({"type": "http.request", "body": bytes(100), "more_body": True})
        asked = asyncio.create_task(posted(app, begins, send))
        await until_soon(lambda: app.state.service.bodies.held == 100)
        asked.cancel()
        await asyncio.wait([asked])
        assert app.state.service.bodies.held == 0

    with_app(nets, scene)


@pytest.mark.parametrize("path", ["/predict", "/predict/batch", "/v2/models/tiny/infer"])
def test_a_refused_body_is_freed_while_the_client_does_not_read(path: str, nets: dict[str, CapsNet]) -> None:
    size = 3_141_592

    def held() -> bool:
        return any(isinstance(part, bytes) and len(part) == size for each in gc.get_objects() for part in refers_to(each))

    async def scene(app: FastAPI) -> None:
        waits = asyncio.Event()

        async def send(message: Message) -> None:
            waits.set()
            await asyncio.sleep(60)

        asked = asyncio.create_task(
            posted(app, sending({"type": "http.request", "body": bytes(size), "more_body": False}), send, path)
        )
        await waits.wait()
        await until_soon(lambda: not held(), seconds=2)  # a thread may hold it a little longer
        asked.cancel()
        await asyncio.wait([asked])

    with_app(nets, scene)


def test_an_answer_counts_as_unread_until_it_is_sent(nets: dict[str, CapsNet], seven: bytes) -> None:
    async def scene(app: FastAPI) -> None:
        waits, reads, bodies = asyncio.Event(), asyncio.Event(), app.state.service.bodies
        sent: list[Message] = []

        async def send(message: Message) -> None:
            waits.set()
            await reads.wait()
            sent.append(message)

        begins = sending({"type": "http.request", "body": seven, "more_body": False})
        asked = asyncio.create_task(posted(app, begins, send))
        await waits.wait()
        unread = bodies.unread
        reads.set()
        await asked
        assert unread == len(sent[-1]["body"]) > 100
        assert bodies.unread == 0

    with_app(nets, scene)


def test_bodies_beyond_the_limit_are_refused_and_release_is_idempotent() -> None:
    bodies, mine, others = Bodies(10), Visit("mine"), Visit("others")
    bodies.take(mine, 8)
    with pytest.raises(Busy):
        bodies.take(others, 3)
    bodies.release(mine)
    bodies.release(mine)
    assert bodies.held == 0
