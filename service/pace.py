"""How long one piece of work takes as of late, and so how long a queue of them is in seconds."""

from __future__ import annotations

from dataclasses import dataclass

LATEST = 0.1  # the weight of the last one; what was twenty ago no longer counts


@dataclass(slots=True)
class Pace:
    seconds: float = 0.0  # a piece; 0 until one is done

    def took(self, seconds: float) -> None:
        self.seconds += (seconds - self.seconds) * (LATEST if self.seconds else 1.0)

    def wait(self, pieces: int, hands: int) -> float:
        """Seconds until these are done by so many at once."""
        return self.seconds * pieces / hands
