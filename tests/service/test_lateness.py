"""Which requests are late because the event loop does not keep up, and which only came in a burst."""

from __future__ import annotations

import pytest

from service.errors import Busy
from service.web import lateness
from service.web.lateness import LATE, QUIET, Lateness

MAX_WAIT = 1.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lateness, "monotonic", clock)
    return clock


def refused(found: Lateness, clock: Clock, waited: float) -> bool:
    try:
        found.admit(clock.now - waited)
    except Busy as error:
        return (error.reason, f"after {waited:.1f} s" in error.detail) == ("loop", True)
    return False


def test_requests_that_wait_in_a_burst_are_admitted(clock: Clock) -> None:
    found = Lateness(MAX_WAIT)
    for waited in (0.1, 0.4, 0.5, 0.69):  # one turn of the loop in which many came
        clock.now = 100 + waited
        assert not refused(found, clock, waited)


def test_only_late_requests_are_refused_while_the_loop_stays_late(clock: Clock) -> None:
    found = Lateness(MAX_WAIT)
    told = []
    for _ in range(20):  # turns that each bring more than the one before, and so take longer than a request may wait
        for waited in (0.0, 0.2, 0.31, 0.5):
            clock.now += 0.1
            told.append((waited, refused(found, clock, waited)))
    assert not any(late for waited, late in told if waited <= LATE)
    assert [late for waited, late in told if waited > LATE] == [False] * 2 + [True] * 38


def test_lateness_is_forgotten_after_a_quiet_period(clock: Clock) -> None:
    found = Lateness(MAX_WAIT)
    assert not refused(found, clock, 0.5)
    clock.now += 0.9
    assert refused(found, clock, 0.5)
    clock.now += QUIET * LATE + 0.1
    assert not refused(found, clock, 0.5)


def test_a_max_wait_of_zero_still_allows_a_moment(clock: Clock) -> None:
    found = Lateness(0.0)
    assert not refused(found, clock, 0.09)
    assert not refused(found, clock, 0.11)
    clock.now += 0.11
    assert refused(found, clock, 0.11)
