"""Files that take seconds to make: one of the processes that run tests makes them for all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(name: str, make: Callable[[Path], object], factory: pytest.TempPathFactory) -> Path:
    """Returns a file or a folder, only to be read, which the first process to ask makes while the others wait."""
    base = factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    root.mkdir(exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole, part = root / name, root / "parts" / name
        if not whole.exists():
            shutil.rmtree(part, ignore_errors=True)
            part.parent.mkdir(exist_ok=True)
            make(part)
            part.rename(whole)
    return whole
