"""How long a queue is in seconds, by what its pieces took and waited since it was last empty."""

from __future__ import annotations

from dataclasses import dataclass

LATEST = 0.1  # the weight of the last piece; what was twenty ago no longer counts
SEEN = 0.5  # the share of a wait that somebody must have had already: that long a crowd may be which comes all at once


@dataclass(slots=True)
class Pace:
    seconds: float = 0.0  # that a piece takes; 0 until one is done
    waited: float = 0.0  # seconds, by the last that began, or by one before it that waited far longer

    def took(self, seconds: float, waited: float) -> None:
        self.seconds += (seconds - self.seconds) * (LATEST if self.seconds else 1.0)
        self.waited = max(waited, self.waited * (1 - LATEST))

    def too_long(self, pieces: float, most: float) -> float:
        """Seconds until these are done, one after the other, if they are more than `most` and it has come near that; else 0."""
        wait = self.seconds * pieces
        return wait if wait > most and self.waited > SEEN * most else 0.0
