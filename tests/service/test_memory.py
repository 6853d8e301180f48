"""A server with less memory than its settings may need says so, and names a setting that would fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.app import create_app
from service.engine import CapsNet
from service.process import cpus, memory
from tests.service.conftest import settings

MB = 1 << 20


@pytest.fixture(
    params=[("0::/slice/unit", "slice", "memory.max"), ("4:memory:/slice/unit", "memory/slice", "memory.limit_in_bytes")]
)
def limit(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the memory limit of a group above ours, in either version of cgroups."""
    membership, folder, file = request.param
    monkeypatch.setattr(cpus, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cpus, "CGROUPS", tmp_path)
    (tmp_path / "membership").write_text(membership)
    (tmp_path / folder / "unit").mkdir(parents=True)
    found: Path = tmp_path / folder / file
    return found


def test_allowed_memory_is_the_lowest_cgroup_limit(limit: Path) -> None:
    assert memory.allowed() is None
    limit.write_text(str(300 * MB))
    (limit.parent / "unit" / limit.name).write_text(str(500 * MB))
    assert memory.allowed() == 300 * MB
    limit.write_text("max")
    assert memory.allowed() == 500 * MB


def test_too_little_memory_is_reported_with_a_setting_that_fits(limit: Path) -> None:
    wanted = settings(max_pixels=10_000_000)
    for megabytes in (400, 460):
        limit.write_text(str(megabytes * MB))
        told = memory.shortage(wanted, pictures=2, bodies=50 * MB) or ""
        fitting = settings(max_pixels=int(told.rpartition("CAPSERVE_MAX_PIXELS=")[2]))
        assert memory.shortage(fitting, pictures=2, bodies=50 * MB) is None
    limit.write_text(str(200 * MB))
    assert (memory.shortage(wanted, pictures=2, bodies=50 * MB) or "").endswith("raise the limit")
    limit.write_text(str(700 * MB))
    assert memory.shortage(wanted, pictures=2, bodies=50 * MB) is None


def test_memory_needed_grows_with_the_number_of_workers(limit: Path) -> None:
    limit.write_text(str(4 * memory.PROCESS_BYTES + 16 * MB))
    few, many = (settings(workers=count, max_pixels=1_000) for count in (4, 5))
    assert memory.shortage(few, pictures=1, bodies=0) is None
    assert memory.shortage(many, pictures=1, bodies=0) is not None


def test_creating_the_app_logs_too_little_memory(limit: Path, nets: dict[str, CapsNet], caplog: pytest.LogCaptureFixture) -> None:
    create_app(settings(threads=2), nets)
    assert caplog.messages == []
    limit.write_text(str(260 * MB))
    create_app(settings(threads=2), nets)
    (told,) = caplog.messages
    assert "260 MB, but with 2 pictures of 25,000,000 pixels this server may need 1142: one of them could end this server" in told
