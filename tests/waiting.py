"""Until something is true, and not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def until(true: Callable[[], object], seconds: float = 10, pause: float = 0.05, said: Callable[[], str] = str) -> None:
    """`said` is what is worth knowing where it does not come true."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, said()
        time.sleep(pause)


async def until_soon(true: Callable[[], object], seconds: float = 10) -> None:
    """The same beside other tasks of a loop."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)
