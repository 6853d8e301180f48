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
        """`most` jobs at once, at work or waiting: each may hold a body of the largest size."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="crew")
        self._most = most
        self._jobs = 0

    async def do(self, job: Callable[[], T]) -> T:
        if self._jobs >= self._most:
            raise Busy(f"{self._jobs} large pictures are in work already; ask again after the seconds in Retry-After")
        self._jobs += 1
        future = self._pool.submit(job)
        future.add_done_callback(lambda _: self._finished())
        return await asyncio.wrap_future(future)

    def _finished(self) -> None:
        self._jobs -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
