"""What one of the processes that run tests makes for all of them, where it takes seconds."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(name: str, make: Callable[[Path], object], factory: pytest.TempPathFactory) -> Path:
    """What the first that asked made there, a file or a folder to be read alone; others wait for it."""
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
