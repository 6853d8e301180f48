"""Refusals, held back where there are many and threads at work.

Whoever is refused may ask again at once, and thousands of refusals a second would leave the threads that decode few turns of the
interpreter: those who were let in would wait for those who were not.
"""

from __future__ import annotations

import asyncio
import time

RATE = 100  # a second, beyond which each is held back: of a slow core 500 take half
HELD = 0.5  # seconds that one is held at most


class Refusals:
    def __init__(self) -> None:
        self._next = 0.0  # time.monotonic() from which one more goes out at once

    async def turn(self) -> None:
        """Returns when the next refusal may go out."""
        now = time.monotonic()
        held = min(max(0.0, self._next - now), HELD)
        self._next = now + held + 1 / RATE
        if held:
            await asyncio.sleep(held)
