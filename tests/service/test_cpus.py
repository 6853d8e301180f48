"""Which processors there are for us, and what they can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.process import cpus


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes a machine of eight cores whose process is in a nested group, in both versions of cgroups."""
    monkeypatch.setattr(cpus, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cpus, "CGROUPS", tmp_path)
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "membership").write_text("4:cpu,cpuacct:/slice/unit\n3:memory:/elsewhere\n0::/slice/unit\n")
    for top in (tmp_path, tmp_path / "cpu"):
        (top / "slice" / "unit").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("folder", ["slice/unit", "slice", "."])
@pytest.mark.parametrize(
    ("written", "expected"), [("max 100000", 8), ("250000 100000", 3), ("10000 100000", 1), ("6400000 100000", 8)]
)
def test_available_cpus_are_limited_by_cgroup_v2_and_affinity(cgroups: Path, folder: str, written: str, expected: int) -> None:
    """Our group or any above it may hold the quota; as a container sees it, that is the topmost."""
    (cgroups / folder / "cpu.max").write_text(written)
    assert cpus.available() == expected


def test_available_cpus_are_limited_by_cgroup_v1(cgroups: Path) -> None:
    assert cpus.available() == 8
    (cgroups / "cpu/slice/cpu.cfs_quota_us").write_text("150000\n")
    (cgroups / "cpu/slice/cpu.cfs_period_us").write_text("100000\n")
    assert cpus.available() == 2
    (cgroups / "membership").unlink()
    assert cpus.available() == 8


@pytest.mark.parametrize(
    ("text", "faster", "dot_products"),
    [
        ("flags\t\t: fpu avx2 avx512_vnni", True, True),
        ("Features\t: asimd asimddp", True, True),
        ("Features\t: asimd", False, False),
        ("flags\t\t: fpu avx2", True, False),
        ("flags\t\t: fpu avx", False, False),
        ("", False, False),
    ],
)
def test_int8_speed_and_dot_products_are_detected_from_cpuinfo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, faster: bool, dot_products: bool
) -> None:
    monkeypatch.setattr(cpus, "CPUINFO", tmp_path / "cpuinfo")
    assert not cpus.is_faster_in_int8()
    assert not cpus.has_dot_products()
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}\n")
    assert (cpus.is_faster_in_int8(), cpus.has_dot_products()) == (faster, dot_products)
