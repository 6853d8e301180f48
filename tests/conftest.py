"""The shipped network and MNIST's test digits, for tests that measure; each skips with a word where it is not to be had."""

from __future__ import annotations

import pytest

from service import catalogue
from service.engine import CapsNet
from service.settings import Settings
from tests.mnist import Digits, load


@pytest.fixture(scope="session")
def mnist() -> Digits:
    return load()


@pytest.fixture(scope="session")
def compact() -> CapsNet:
    settings = Settings()
    folder = settings.models / "compact"
    if not folder.exists():
        pytest.skip("needs the shipped bundle: no models/compact")
    return catalogue.opener(settings)(folder)
