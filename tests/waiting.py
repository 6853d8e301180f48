"""Waits until something is true, and not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def until(true: Callable[[], object], seconds: float = 10, pause: float = 0.05, said: Callable[[], str] = str) -> None:
    """Waits until `true()` holds; if it does not in time, fails with the text of `said()`."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, said()
        time.sleep(pause)


async def until_soon(true: Callable[[], object], seconds: float = 10) -> None:
    """Does the same while other tasks of the event loop run."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)
