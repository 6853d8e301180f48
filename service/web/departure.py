"""Cancels a request whose client has disconnected, so that nothing of it waits for the model any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

WATCH_AFTER = 0.05  # seconds; most requests are answered sooner, and a watcher for each would cost more than it saves


@contextmanager
def cancel_on_disconnect(request: Request) -> Iterator[None]:
    """Cancel what is awaited inside once the client is gone, and raise ClientDisconnect. The body must have been read."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    watchers: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        task.cancel(msg="gone")

    timer = loop.call_later(WATCH_AFTER, lambda: watchers.append(loop.create_task(watch())))
    try:
        yield
    except asyncio.CancelledError as error:
        if error.args != ("gone",):
            raise
        task.uncancel()
        raise ClientDisconnect from None
    finally:
        timer.cancel()
        for watcher in watchers:
            watcher.cancel()
