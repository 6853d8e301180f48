"""Estimates how long a queue takes, by what its pieces took since it was last empty."""

from __future__ import annotations

import math
from dataclasses import dataclass

LATEST_WEIGHT = 0.1  # the weight of the last piece; one twenty pieces ago hardly counts any more
WAITED_SHARE = 0.5  # the share of the longest wait that somebody must have waited already: until then a sudden crowd is let in
DEADLINE_SHARE = 0.5  # the share of the deadline that an estimated wait may take: on a busy machine later pieces take longer


@dataclass(slots=True)
class Pace:
    seconds: float = 0.0  # per piece; 0 until one is done

    def record(self, seconds: float) -> None:
        self.seconds += (seconds - self.seconds) * (LATEST_WEIGHT if self.seconds else 1.0)

    def pieces_in(self, seconds: float) -> float:
        """How many pieces are done in so many seconds."""
        return seconds / self.seconds if self.seconds else math.inf

    def excessive_wait(self, pieces: float, waited: float, most: float, deadline: float = math.inf) -> float:
        """Returns the estimated seconds until `pieces` are done, one after the other, if that is too long, and otherwise 0.

        Too long is more than `most` if somebody has `waited` for a good part of it, or so long that they may miss the deadline.
        """
        wait = self.seconds * pieces
        return wait if wait > DEADLINE_SHARE * deadline or (wait > most and waited > WAITED_SHARE * most) else 0.0

    def seconds_until_room(self, pieces: float, most: float, deadline: float = math.inf) -> float:
        """Seconds until so few of `pieces` are left that another would be let in; past the deadline none is left.

        Where any wait is allowed, because the queue is limited in pieces alone, until all are done.
        """
        room = min(most, DEADLINE_SHARE * deadline)
        return min(self.seconds * pieces, deadline) - (room if room < math.inf else 0.0)
