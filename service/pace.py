"""How long a queue is in seconds, by what its pieces took since it was last empty."""

from __future__ import annotations

import math
from dataclasses import dataclass

LATEST = 0.1  # the weight of the last piece; what was twenty ago no longer counts
SEEN = 0.5  # the share of a wait that somebody must have had already: that long a crowd may be which comes all at once
FORESEEN = 0.5  # the share of a deadline that a wait may be foreseen to take: on a busy machine what is next takes longer


@dataclass(slots=True)
class Pace:
    seconds: float = 0.0  # that a piece takes; 0 until one is done

    def took(self, seconds: float) -> None:
        self.seconds += (seconds - self.seconds) * (LATEST if self.seconds else 1.0)

    def pieces(self, seconds: float) -> float:
        """How many are done in so long."""
        return seconds / self.seconds if self.seconds else math.inf

    def too_long(self, pieces: float, waited: float, most: float, deadline: float = math.inf) -> float:
        """Seconds until these are done, one after the other, if they are more than `most` and somebody has `waited` for nearly as
        long, or if they may end past the deadline; else 0."""
        wait = self.seconds * pieces
        return wait if wait > FORESEEN * deadline or (wait > most and waited > SEEN * most) else 0.0

    def until_room(self, pieces: float, most: float, deadline: float = math.inf) -> float:
        """Seconds until of these so few are left that another would be let in; past the deadline none is."""
        return min(self.seconds * pieces, deadline) - min(most, FORESEEN * deadline)
