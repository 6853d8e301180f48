"""A few threads for work that would hold up the event loop: decoding large pictures, writing large PNGs. Bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.errors import Busy

T = TypeVar("T")


class Crew:
    def __init__(self, threads: int, most: int) -> None:
        """`most` jobs at once, at work or waiting."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="crew")
        self._most = most
        self._jobs = 0

    async def do(self, job: Callable[[], T]) -> T:
        if self._jobs >= self._most:
            raise Busy(f"{self._jobs} pictures wait to be decoded or drawn; ask again after the seconds in Retry-After", "crew")
        self._jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, job)
        finally:
            self._jobs -= 1

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
