"""Whether the event loop keeps up with what comes; where it does not, each request would wait longer than the one before."""

from __future__ import annotations

from math import inf
from time import monotonic

from service.errors import Busy

LATE = 0.3  # of the longest wait: it has lain as long in the kernel, where nobody sees it, and its answer may wait once more
MOMENT = 0.1  # seconds that anything may take
QUIET = 4  # times as long as one may be late: after so long the next that is late is the first again


class Lateness:
    """A burst, or a moment in which the machine did something else, is none yet: those whom it made wait are let in."""

    def __init__(self, max_wait: float) -> None:
        self._longest = max(MOMENT, LATE * max_wait)
        self._first = self._last = -inf  # when one that was late was looked at

    def admit(self, arrived: float) -> None:
        """Raises Busy where a request that came then is late, and others have been for longer than any should wait."""
        now = monotonic()
        waited = now - arrived
        if waited <= self._longest:
            return
        if now - self._last > QUIET * self._longest:
            self._first = now
        self._last = now
        if now - self._first > self._longest:
            raise Busy(
                f"more requests come than can be read: this one was read after {waited:.1f} s; ask again after the seconds "
                "in Retry-After",
                "loop",
            )
