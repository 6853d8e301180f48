"""When a supervisor replaces which worker; the workers here are fakes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.process import tallies, workers
from service.process.workers import _Supervisor, _Worker
from tests.service.conftest import settings


@pytest.fixture
def supervisor() -> _Supervisor:
    return _Supervisor(settings(workers=2), lambda *_: None, ("127.0.0.1", 0), ExitStack())


def test_a_server_that_has_served_is_not_given_up_after_many_deaths(supervisor: _Supervisor) -> None:
    supervisor._failures = 100 * workers.TRIES
    assert not supervisor._retry_later([0], "worker 7 died")  # none ever listened
    supervisor._beats[1] = 1
    assert supervisor._retry_later([0], "worker 7 died")


def test_a_supervisor_told_to_stop_starts_no_more_workers(supervisor: _Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def start(place: int) -> None:
        started.append(place)
        supervisor._stop()

    monkeypatch.setattr(supervisor, "_start", start)
    assert supervisor._start_due()
    assert len(started) == 1


def test_a_worker_that_dies_after_a_long_life_is_replaced_soon(
    supervisor: _Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(tallies.FOLDER_VARIABLE, str(tmp_path))
    supervisor._beats[0] = 1
    dead = SimpleNamespace(pid=7, exitcode=-9, is_alive=lambda: False)
    for lived, pause in ((1.0, workers.LONGEST_PAUSE), (workers.LONGEST_PAUSE + 1, workers.FIRST_PAUSE)):
        supervisor._pause = workers.LONGEST_PAUSE
        now = time.monotonic()
        supervisor._workers = [_Worker(0, dead, now - lived, 0)]  # type: ignore[arg-type]
        assert supervisor._remove_dead()
        assert supervisor._due[0] - now == pytest.approx(pause, abs=0.3)
