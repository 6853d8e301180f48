"""Metrics of several workers, in files that they share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from prometheus_client import values

from service import metrics
from service.metrics import Metrics
from service.process import tallies


def test_another_users_metrics_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(tallies.FOLDER_VARIABLE, "")
    left = tmp_path / f"{tallies.PREFIX}left"
    left.mkdir()
    os.utime(left, (0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
        with tallies.folder():
            assert left.exists()
    with tallies.folder():
        assert not left.exists()


@pytest.mark.parametrize(
    ("name", "said", "together"),
    [
        ("ready", (1, 0, 1), 0),
        ("reloaded", (1, 0, 1), 0),
        ("workers", (1, 1, 1), 3),
        ("workers_wanted", (3, 3, 3), 3),
        ("body_bytes", (1, 2, 3), 6),
        ("unread_bytes", (1, 2, 3), 6),
    ],
)
def test_gauges_of_several_workers_are_combined(
    name: str, said: tuple[int, ...], together: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(tallies.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)  # which keep_in_files sets
    for place, value in enumerate(said):
        metrics.keep_in_files(place)
        worker = Metrics()
        gauge = getattr(worker, name)
        gauge.set(value)
    lines = worker.text().decode().splitlines()
    assert [float(line.split()[-1]) for line in lines if line.startswith(f"{gauge._name} ")] == [together]
