"""Refusals, held back when there are many and threads are at work.

A refused client may ask again at once, and thousands of refusals a second would leave the decoding threads little of the GIL:
admitted requests would wait for refused ones.
"""

from __future__ import annotations

import asyncio
import time

RATE = 100  # per second, above which each is held back: 500 take half of a slow core
LONGEST_DELAY = 0.5  # seconds


class Refusals:
    def __init__(self) -> None:
        self._next = 0.0  # time.monotonic() from which the next goes out at once

    async def turn(self) -> None:
        """Wait until the next refusal may go out."""
        now = time.monotonic()
        delay = min(max(0.0, self._next - now), LONGEST_DELAY)
        self._next = now + delay + 1 / RATE
        if delay:
            await asyncio.sleep(delay)
