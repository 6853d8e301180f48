"""What this process may use of the machine: ONNX Runtime would count the host's cores, not those of the container."""

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
    """Return the cores that the affinity mask and the cgroup's quota leave us, at least one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def is_faster_in_int8() -> bool:
    return not FASTER_IN_INT8.isdisjoint(_flags())


def has_dot_products() -> bool:
    """Whether the CPU has int8 dot products. AVX2 has none, and what replaces them there saturates on sums of two products."""
    return not DOT_PRODUCTS.isdisjoint(_flags())


def _flags() -> list[str]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return []  # no Linux
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").split()


def _quota() -> float | None:
    """Return the smallest quota, in cores, of our cgroup and those above it, or None if there is none."""
    allowed = [quota for folder in cgroup_folders("cpu") if (quota := _quota_of(folder)) is not None]
    return min(allowed, default=None)


def cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of our cgroup and all above it, for cgroups v1 or v2; in a container only the topmost may exist."""
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


def _quota_of(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit, period = ((folder / f"cpu.cfs_{which}_us").read_text().strip() for which in ("quota", "period"))
        except OSError:
            return None
    return None if limit in ("max", "-1") else int(limit) / int(period)
