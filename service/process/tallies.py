"""The files of several workers' metrics, so that any worker can add them up: allocated in full, and kept for successors."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from service.errors import StartError

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # the environment variable that prometheus-client reads
PREFIX = "capserve-metrics-"
FRESH = 60  # seconds in which a new folder may not be locked yet

logger = logging.getLogger(__name__)

Across = Literal["livesum", "livemin", "livemax", "max"]  # how several workers' gauges are combined
# Bytes. Writing to a page that the disk has no room for ends a process (SIGBUS), so the files hold more series than
# some twenty models have; with more they grow, and then this can happen.
SIZES = {"counter": 1 << 18, "histogram": 1 << 19, **{f"gauge_{across}": 1 << 16 for across in get_args(Across)}}


@contextmanager
def folder() -> Iterator[None]:
    """Make the workers' folder, and remove it at the end."""
    try:
        _remove_left_behind(Path(tempfile.gettempdir()))
        temporary = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
    except OSError as error:
        raise StartError(
            f"several workers keep their metrics in a temporary folder: {error.strerror}; choose another with TMPDIR, "
            "or use one worker (CAPSERVE_WORKERS=1)"
        ) from error
    with temporary as name:
        os.environ[FOLDER_VARIABLE] = name
        descriptor = os.open(name, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # systemd-tmpfiles removes what is old, but not what is locked
        try:
            yield
        finally:
            os.close(descriptor)


def _remove_left_behind(temporary: Path) -> None:
    """Remove our folders that nobody holds: the process that made them was killed before it could."""
    for each in temporary.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(each, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and status.st_mtime < time.time() - FRESH:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(each, ignore_errors=True)
        except BlockingIOError:  # in use
            pass
        finally:
            os.close(descriptor)


def create_files(place: int) -> None:
    """Create the files of the worker at this place, each in full or not at all; a predecessor's files are kept."""
    directory = Path(os.environ[FOLDER_VARIABLE])
    try:
        if not directory.is_dir():
            logger.error(
                "the folder of the workers' metrics, %s, was removed: restart the server, or metrics stay incomplete", directory
            )
            directory.mkdir()
        for kind, size in SIZES.items():
            file = directory / f"{kind}_{place}.db"
            if not file.exists():
                part = file.with_suffix(".part")
                part.write_bytes(bytes(size))
                part.rename(file)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, for {sum(SIZES.values()):,} bytes of metrics in {directory}") from error
