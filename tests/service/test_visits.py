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
    ids=["its body comes after its turn", "it is all here and waits for its turn behind others on its connection"],
)
def test_what_a_request_waits_for_is_the_services_time_once_it_is_here(turn: float, whole: float, complete: float) -> None:
    scope: dict[str, Any] = {"headers": [], visits.TURN: turn, visits.WHOLE: whole}
    visit = visits.begin(scope)
    assert (visit.arrived, visit.complete) == (turn, turn)  # if nobody reads a body, it stays so
    visits.completed(scope)
    assert (visit.arrived, visit.complete) == (turn, complete)


def test_where_the_connection_does_not_tell_it_is_here_when_it_is_read() -> None:
    scope: dict[str, Any] = {"headers": []}
    before = time.monotonic()
    visit = visits.begin(scope)
    visits.completed(scope)
    assert before <= visit.arrived <= visit.complete <= time.monotonic()


def test_the_connection_tells_when_a_body_was_here(
    nets: dict[str, CapsNet], seven: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    completed = visits.completed

    def noted(scope: Any) -> None:
        told.append(time.monotonic() - scope[visits.WHOLE])
        completed(scope)

    monkeypatch.setattr(visits, "completed", noted)
    with serving(settings(), nets) as client:
        client.post("/predict", content=seven)
    assert len(told) == 1
    assert told[0] >= 0
