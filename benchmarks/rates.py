"""Counts runs per second of several contenders, in turn, so that whatever else the machine does affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Name = TypeVar("Name")

ROUNDS, SECONDS = 5, 0.4  # each contender runs this long in each round


def in_turn(contenders: Mapping[Name, Callable[[], object]]) -> dict[Name, list[float]]:
    """Runs per second of each, by round."""
    rates: dict[Name, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            rates[name].append(_rate(run))
    return rates


def _rate(run: Callable[[], object]) -> float:
    run()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        run()
        count += 1
    return count / (time.perf_counter() - began)
