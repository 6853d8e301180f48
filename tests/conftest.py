"""The shipped network and MNIST's test digits, for tests that measure; tests skip, and say why, where these are missing."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from service import bundle, catalogue
from service.engine import CapsNet, Perception
from service.process import allocator
from service.settings import Settings
from tests.mnist import Digits, load


def pytest_configure() -> None:
    """Resets signals: a shell's background jobs ignore interrupts, nohup's ignore hangups, and programs of tests would, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)  # still ignored here, but not inherited
    # Pages that tests draw take some megabytes: giving these back to the system each time would cost a quarter of the time.
    allocator.return_large_blocks(large=32 << 20, kept=64 << 20)


@pytest.fixture(scope="session")
def mnist() -> Digits:
    return load()


@pytest.fixture(scope="session")
def compact() -> CapsNet:
    settings = Settings()
    folder = settings.models / "compact"
    if not folder.exists():
        pytest.skip("needs the shipped bundle: no models/compact")
    return catalogue.opener(settings)(bundle.read(folder))


@pytest.fixture(scope="session")
def seen(compact: CapsNet, mnist: Digits) -> Perception:
    """What the shipped network sees in all of MNIST's test digits."""
    pictures = mnist.images[:, None] / np.float32(255)
    parts = [compact.perceive(part, np.ones(len(part), bool)) for part in np.array_split(pictures, 20)]
    return Perception(*map(np.concatenate, zip(*parts, strict=True)))
