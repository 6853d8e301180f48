"""When a request arrived, and from when on its time is the service's."""

from __future__ import annotations

import time
from typing import Any

import pytest

from service import visits
from service.engine import CapsNet
from tests.service.conftest import serving, settings


@pytest.mark.parametrize(
    ("turn", "whole", "complete"),
    [(1.0, 2.0, 2.0), (2.0, 1.0, 2.0)],
    ids=["body arrives after its turn", "whole request waits behind others"],
)
def test_a_visit_is_complete_once_its_turn_and_body_have_come(turn: float, whole: float, complete: float) -> None:
    scope: dict[str, Any] = {"headers": [], visits.TURN: turn, visits.COMPLETE: whole}
    visit = visits.begin(scope)
    assert (visit.arrived, visit.complete) == (turn, turn)  # if nobody reads a body, it stays so
    visits.body_arrived(scope)
    assert (visit.arrived, visit.complete) == (turn, complete)


def test_without_times_of_the_connection_a_visit_completes_when_read() -> None:
    scope: dict[str, Any] = {"headers": []}
    before = time.monotonic()
    visit = visits.begin(scope)
    visits.body_arrived(scope)
    assert before <= visit.arrived <= visit.complete <= time.monotonic()


def test_the_connection_records_when_a_body_was_complete(
    nets: dict[str, CapsNet], seven: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    completed = visits.body_arrived

    def noted(scope: Any) -> None:
        told.append(time.monotonic() - scope[visits.COMPLETE])
        completed(scope)

    monkeypatch.setattr(visits, "body_arrived", noted)
    with serving(settings(), nets) as client:
        client.post("/predict", content=seven)
    assert len(told) == 1
    assert told[0] >= 0
