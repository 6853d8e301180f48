"""The shipped network and MNIST's test digits, for tests that measure; each skips with a word where it is not to be had."""

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
    """A shell has what it starts in the background ignore interrupts, and nohup hang-ups; so would programs that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)  # ignored here all the same, and handed on to nobody
    # Pages that tests draw are of some megabytes: a quarter of the time it takes is the system's, if it gets them back each time.
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
    """What the one makes of the other, all of it."""
    pictures = mnist.images[:, None] / np.float32(255)
    parts = [compact.perceive(part, np.ones(len(part), bool)) for part in np.array_split(pictures, 20)]
    return Perception(*map(np.concatenate, zip(*parts, strict=True)))
