"""Whether the event loop keeps up with requests; if it does not, each would wait longer than the one before."""

from __future__ import annotations

from math import inf
from time import monotonic

from service.errors import Busy

LATE = 0.3  # of the longest wait: a request has waited as long in the kernel, unseen, and its answer may wait once more
MOMENT = 0.1  # seconds that a request may be late in any case
QUIET = 4  # times the allowed lateness: after so long without a late request the next one counts as the first


class Lateness:
    """Tolerates a burst, or a moment in which the machine did something else: requests delayed by it are admitted."""

    def __init__(self, max_wait: float) -> None:
        self._allowed = max(MOMENT, LATE * max_wait)
        self._first_late = self._last_late = -inf  # when late requests were seen

    def admit(self, arrived: float) -> None:
        """Raise Busy if a request that arrived then is late, and requests have been late for longer than one may wait."""
        now = monotonic()
        waited = now - arrived
        if waited <= self._allowed:
            return
        if now - self._last_late > QUIET * self._allowed:
            self._first_late = now
        self._last_late = now
        if now - self._first_late > self._allowed:
            raise Busy(
                f"more requests come than can be read: this one was read after {waited:.1f} s; ask again after the seconds "
                "in Retry-After",
                "loop",
            )
