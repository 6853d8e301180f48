"""What this process may use of the machine: ONNX Runtime would count the host's cores, which a container does not have."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
INT8_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "asimddp"})  # x86's and ARM's int8 dot products


def available() -> int:
    """Cores that the affinity mask and the cgroup's quota leave us, at least one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def multiplies_int8() -> bool:
    """Whether int8 is faster than float32 here. Without such instructions it is no faster, or wrong: AVX2's sums saturate."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not INT8_FLAGS.isdisjoint(flags.split())


def _quota() -> float | None:
    """Cores' worth of time a period, the least that our cgroup and those above it allow."""
    allowed = [quota for folder in _folders() if (quota := _of(folder)) is not None]
    return min(allowed, default=None)


def _folders() -> Iterator[Path]:
    """Ours and all above it, in either version of cgroups; in a container the first that is mounted may be the topmost."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            top = CGROUPS / "cpu" if controllers else CGROUPS
            ours = top / path.lstrip("/")
            yield from (folder for folder in (ours, *ours.parents) if folder.is_relative_to(top))


def _of(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit, period = ((folder / f"cpu.cfs_{which}_us").read_text().strip() for which in ("quota", "period"))
        except OSError:
            return None
    return None if limit in ("max", "-1") else int(limit) / int(period)
