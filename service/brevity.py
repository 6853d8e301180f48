"""Whether small pictures may be decoded on the event loop: not for a while after one that took long, as some are made to do."""

from __future__ import annotations

LONG = 0.05  # seconds of a processor; most take some milliseconds
AVOIDED = 100  # small pictures that the crew gets after one that took so long


class Brevity:
    def __init__(self) -> None:
        self._avoided = 0  # still to come

    def expected(self) -> bool:
        """Asked once for each small picture."""
        if self._avoided:
            self._avoided -= 1
            return False
        return True

    def took(self, seconds: float) -> None:
        """On the event loop, of a processor."""
        if seconds > LONG:
            self._avoided = AVOIDED
