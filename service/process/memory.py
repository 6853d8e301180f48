"""How much memory a server may need, and how much it is allowed: one that takes more is killed in the middle of a picture."""

from __future__ import annotations

from pathlib import Path

from service.process import cpus
from service.settings import Settings

PROCESS_BYTES = 220 << 20  # one process with the three shipped models
PIXEL_BYTES = 16  # each pixel of a picture that is being decoded
FILES = ("memory.max", "memory.limit_in_bytes")  # in cgroups v2 and v1


def allowed() -> int | None:
    """Return the smallest limit, in bytes, of our cgroup and those above it, or None if there is none."""
    limits = [
        limit for folder in cpus.cgroup_folders("memory") for file in FILES if (limit := _limit_in(folder / file)) is not None
    ]
    return min(limits, default=None)


def shortage(settings: Settings, pictures: int, bodies: int) -> str | None:
    """Return a warning if the limit is too low for this many pictures at once and bytes of bodies, over all workers."""
    if (limit := allowed()) is None:
        return None
    besides_pictures = settings.workers * PROCESS_BYTES + bodies
    needed = besides_pictures + pictures * PIXEL_BYTES * settings.max_pixels
    if limit >= needed:
        return None
    message = (
        f"a memory limit of {limit >> 20} MB, but with {pictures} pictures of {settings.max_pixels:,} pixels this server may need"
    )
    fitting_pixels = max(0, limit - besides_pictures) // (pictures * PIXEL_BYTES)
    instead = f", or set CAPSERVE_MAX_PIXELS={fitting_pixels}" if fitting_pixels else ""
    return f"{message} {needed >> 20}: one of them could end this server; raise the limit{instead}"


def _limit_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return None
