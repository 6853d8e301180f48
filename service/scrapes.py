"""Writes the text of /metrics, once for all scrapes that wait at the same time, one text after another, with a rest in between.

/metrics requires no key, and writing it takes tens of milliseconds: however many scrapes come, and however often, the models
get the rest of the CPU time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

REST = 4  # times as long as writing the last text took, but at most LONGEST_REST
LONGEST_REST = 1.0  # seconds: on a busy machine, or with a silent Ray replica, writing takes nearly as long as Prometheus waits


class Scrapes:
    def __init__(self, write: Callable[[], Awaitable[bytes]]) -> None:
        self._write = write
        self._next: asyncio.Task[bytes] | None = None  # not begun yet: further scrapes may share it
        self._turn = asyncio.Lock()
        self._rest_ends = 0.0  # time.monotonic()

    async def text(self) -> bytes:
        """Returns a text that covers everything that happened before this call."""
        if self._next is None:
            self._next = asyncio.create_task(self._write_next())
        return await asyncio.shield(self._next)

    async def _write_next(self) -> bytes:
        async with self._turn:
            await asyncio.sleep(self._rest_ends - time.monotonic())
            self._next = None
            began = time.monotonic()
            try:
                return await self._write()
            finally:
                ended = time.monotonic()
                self._rest_ends = ended + min(REST * (ended - began), LONGEST_REST)
