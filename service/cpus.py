"""What this process may use of the machine: ONNX Runtime would count the host's cores, which a container does not have."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
CGROUP_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
INT8_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "asimddp"})  # x86's and ARM's int8 dot products


def available() -> int:
    """Cores that the affinity mask and the cgroup's quota leave us, at least one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def multiplies_int8(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether int8 is faster than float32 here. Without such instructions it is no faster, or wrong: AVX2's sums saturate."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not INT8_FLAGS.isdisjoint(flags.split())


def _quota() -> float | None:
    """Cores' worth of time a period, in either version of cgroups."""
    try:
        limit, period = CGROUP_V2.read_text().split()
    except (OSError, ValueError):
        try:
            limit, period = (path.read_text().strip() for path in CGROUP_V1)
        except OSError:
            return None
    return None if limit in ("max", "-1") else int(limit) / int(period)
