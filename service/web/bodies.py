"""Counts the bytes of request bodies and unread answers in memory: besides the limits of each request, their sum is limited."""

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
        visit.body_bytes += size

    def release(self, visit: Visit) -> None:
        self.held -= visit.body_bytes
        visit.body_bytes = 0

    def admit(self, size: int = 0) -> None:
        """Raise Busy if `size` more bytes would exceed the limit."""
        if self.held + self.unread + size > self._most:
            raise Busy("others' bodies and unread answers fill the memory reserved for them; ask again later", "bodies")
