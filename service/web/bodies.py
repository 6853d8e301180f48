"""How many bytes of requests' bodies are in memory, over all requests, and of answers that nobody has read: what one may send or
ask for is limited, and so is the sum."""

from __future__ import annotations

from service.errors import Busy
from service.visits import Visit


class Bodies:
    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        self.unread = 0

    def take(self, visit: Visit, size: int) -> None:
        self.admit(size)
        self.held += size
        visit.holds += size

    def release(self, visit: Visit) -> None:
        self.held -= visit.holds
        visit.holds = 0

    def admit(self, size: int = 0) -> None:
        """Raises Busy when that many more would be too many."""
        if self.held + self.unread + size > self._most:
            raise Busy("others' bodies and unread answers fill the memory reserved for them; ask again later", "bodies")
