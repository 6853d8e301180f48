"""Whether small pictures may be decoded on the event loop: not for a while after one that took long, perhaps on purpose."""

from __future__ import annotations

LONG = 0.05  # seconds of CPU time; most pictures take a few milliseconds
PENALTY = 100  # small pictures that go to the crew after one that took longer than LONG


class Brevity:
    def __init__(self) -> None:
        self._penalty = 0  # small pictures still to go to the crew

    def allows_next(self) -> bool:
        """Whether the next small picture may be decoded on the loop; called once for each."""
        if self._penalty:
            self._penalty -= 1
            return False
        return True

    def record(self, seconds: float) -> None:
        """Records the CPU time that decoding a picture took on the event loop."""
        if seconds > LONG:
            self._penalty = PENALTY
