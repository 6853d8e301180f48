"""How long a queue takes, judged by its pieces: a single slow one does not decide, and before the first nothing is known."""

from __future__ import annotations

import math

import pytest

from service.pace import DEADLINE_SHARE, LATEST_WEIGHT, WAITED_SHARE, Pace


def test_the_first_piece_sets_the_pace_and_later_ones_only_adjust_it() -> None:
    pace = Pace()
    assert pace.pieces_in(1.0) == math.inf
    pace.record(0.1)
    assert pace.pieces_in(1.0) == pytest.approx(10)
    pace.record(1.1)
    assert pace.seconds == pytest.approx(0.1 + LATEST_WEIGHT)


def test_a_wait_is_too_long_if_somebody_waits_or_the_deadline_is_near() -> None:
    pace = Pace(0.1)
    assert pace.excessive_wait(20, waited=0.0, most=1.0) == 0
    assert pace.excessive_wait(20, waited=WAITED_SHARE, most=1.0) == 0
    assert pace.excessive_wait(20, waited=WAITED_SHARE + 0.01, most=1.0) == pytest.approx(2.0)
    assert pace.excessive_wait(9, waited=9.0, most=1.0) == 0
    assert pace.excessive_wait(20, waited=0.0, most=9.0, deadline=2.0 / DEADLINE_SHARE - 0.1) == pytest.approx(2.0)


def test_there_is_room_when_the_rest_fits_or_the_deadline_has_passed() -> None:
    pace = Pace(0.1)
    assert pace.seconds_until_room(20, most=0.5) == pytest.approx(1.5)
    assert pace.seconds_until_room(20, most=math.inf) == pytest.approx(2.0)
    assert pace.seconds_until_room(20, most=9.0, deadline=2.0) == pytest.approx(2.0 - DEADLINE_SHARE * 2.0)
    assert pace.seconds_until_room(9_000, most=0.5, deadline=10.0) == pytest.approx(9.5)
