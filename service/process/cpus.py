"""What this process may use of the machine: ONNX Runtime would count the host's cores, which a container does not have."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "asimddp"})  # of int8, x86's and ARM's
FASTER_IN_INT8 = DOT_PRODUCTS | {"avx2"}


def available() -> int:
    """Cores that the affinity mask and the cgroup's quota leave us, at least one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def is_faster_in_int8() -> bool:
    return not FASTER_IN_INT8.isdisjoint(_flags())


def has_dot_products() -> bool:
    """Of int8. AVX2 has none, and in what stands for them there sums of two products saturate."""
    return not DOT_PRODUCTS.isdisjoint(_flags())


def _flags() -> list[str]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return []  # no Linux
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").split()


def _quota() -> float | None:
    """Cores' worth of time a period, the least that our cgroup and those above it allow."""
    allowed = [quota for folder in groups("cpu") if (quota := _of(folder)) is not None]
    return min(allowed, default=None)


def groups(controller: str) -> Iterator[Path]:
    """Ours and all above it, in either version of cgroups; in a container the first that is mounted may be the topmost."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = CGROUPS / controller if controllers else CGROUPS
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
