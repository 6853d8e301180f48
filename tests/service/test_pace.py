"""How long a queue takes, judged by its pieces: a single slow one does not decide, and before the first nothing is known."""

from __future__ import annotations

import math

import pytest

from service.pace import FORESEEN, LATEST, SEEN, Pace


def test_the_first_is_believed_and_of_those_after_it_none_alone() -> None:
    pace = Pace()
    assert pace.pieces(1.0) == math.inf
    pace.took(0.1)
    assert pace.pieces(1.0) == pytest.approx(10)
    pace.took(1.1)
    assert pace.seconds == pytest.approx(0.1 + LATEST)


def test_a_wait_is_too_long_where_somebody_had_most_of_it_or_where_the_deadline_may_pass() -> None:
    pace = Pace(0.1)
    assert pace.too_long(20, waited=0.0, most=1.0) == 0
    assert pace.too_long(20, waited=SEEN, most=1.0) == 0
    assert pace.too_long(20, waited=SEEN + 0.01, most=1.0) == pytest.approx(2.0)
    assert pace.too_long(9, waited=9.0, most=1.0) == 0
    assert pace.too_long(20, waited=0.0, most=9.0, deadline=2.0 / FORESEEN - 0.1) == pytest.approx(2.0)


def test_there_is_room_when_what_is_left_would_be_let_in_and_at_the_latest_past_the_deadline() -> None:
    pace = Pace(0.1)
    assert pace.until_room(20, most=0.5) == pytest.approx(1.5)
    assert pace.until_room(20, most=9.0, deadline=2.0) == pytest.approx(2.0 - FORESEEN * 2.0)
    assert pace.until_room(9_000, most=0.5, deadline=10.0) == pytest.approx(9.5)
