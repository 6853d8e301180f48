"""A few threads for work that would hold up the event loop: decoding large pictures, writing large PNGs. Bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.errors import Busy

T = TypeVar("T")


class Crew:
    def __init__(self, threads: int, most_jobs: int, most_bytes: int) -> None:
        """Limits of what is at work or waiting: jobs, and bytes of the bodies that they hold."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="crew")
        self._most_bytes = most_bytes
        self._least = most_bytes // most_jobs  # what the smallest job weighs, so that one sum keeps both limits
        self._bytes = 0

    async def do(self, job: Callable[[], T], holds: int = 0) -> T:
        """Runs `job`, which holds a body of that many bytes."""
        weight = max(holds, self._least)
        if self._bytes + weight > self._most_bytes:
            raise Busy("as many pictures as fit are being decoded already; ask again after the seconds in Retry-After")
        self._bytes += weight
        loop, future = asyncio.get_running_loop(), self._pool.submit(job)
        # Not when our caller goes: a job that has begun holds its memory to its end.
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, weight))
        return await asyncio.wrap_future(future)

    def _release(self, weight: int) -> None:
        self._bytes -= weight

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
