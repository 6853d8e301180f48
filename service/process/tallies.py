"""The files in which several workers count, so that whichever is asked can add up: taken from the disk whole, and kept."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from service.errors import StartError

FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # in the environment, where prometheus-client looks for it

Across = Literal["livesum", "livemin", "livemax"]  # what several workers' gauges come to together
# Bytes. A write to a page that the disk has no room for ends a process (SIGBUS), so they hold more series than
# some twenty models have; beyond that they grow, and then this can happen.
SIZES = {"counter": 1 << 18, "histogram": 1 << 19, **{f"gauge_{across}": 1 << 16 for across in get_args(Across)}}


@contextmanager
def folder() -> Iterator[None]:
    """Theirs, until they are done."""
    try:
        made = tempfile.TemporaryDirectory(prefix="capserve-metrics-", ignore_cleanup_errors=True)
    except OSError as error:
        raise StartError(
            f"several workers keep their metrics in a temporary folder: {error.strerror}; name a place for it with TMPDIR, "
            "or have one worker (CAPSERVE_WORKERS=1)"
        ) from error
    with made as name:
        os.environ[FOLDER] = name
        held = os.open(name, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)  # systemd-tmpfiles removes what is old, and leaves alone what is locked
        try:
            yield
        finally:
            os.close(held)


def lay_down(place: int) -> None:
    """The files of the worker at this place, each whole or not at all; those of one that was there before stay."""
    files = Path(os.environ[FOLDER])
    try:
        files.mkdir(exist_ok=True)
        for kind, size in SIZES.items():
            file = files / f"{kind}_{place}.db"
            if not file.exists():
                part = file.with_suffix(".part")
                part.write_bytes(bytes(size))
                part.rename(file)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, for {sum(SIZES.values()):,} bytes of metrics in {files}") from error
