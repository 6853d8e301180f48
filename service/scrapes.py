"""What /metrics tells, written once for all who ask at the same time: one text after the other, and with a rest between two.

No key is asked for there, and to write it takes tens of milliseconds: however many ask, and however often, the models have the
rest of the processor's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

REST = 4  # times as long as it took to write the last, within
LONGEST = 1.0  # seconds: where a machine is busy, or a replica of Ray's silent, it takes nearly as long as Prometheus waits


class Scrapes:
    def __init__(self, write: Callable[[], Awaitable[bytes]]) -> None:
        self._write = write
        self._next: asyncio.Task[bytes] | None = None  # not begun: whoever comes may have it
        self._turn = asyncio.Lock()
        self._rested = 0.0  # time.monotonic()

    async def text(self) -> bytes:
        """It tells of all that happened before it was asked for."""
        if self._next is None:
            self._next = asyncio.create_task(self._written())
        return await asyncio.shield(self._next)

    async def _written(self) -> bytes:
        async with self._turn:
            await asyncio.sleep(self._rested - time.monotonic())
            self._next = None
            began = time.monotonic()
            try:
                return await self._write()
            finally:
                ended = time.monotonic()
                self._rested = ended + min(REST * (ended - began), LONGEST)
