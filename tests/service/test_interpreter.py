"""The interpreter in a real server: the collector passes over what lives long, garbage goes, and threads give way sooner."""

from __future__ import annotations

import gc
import shutil
import sys
import weakref
from pathlib import Path

import pytest

from service import commands
from service.process import interpreter, server
from service.served import Served
from tests.service.bundles import TINY, renewed
from tests.service.conftest import serving, settings


class Ring:
    """Garbage that reference counting does not find."""

    def __init__(self) -> None:
        self.itself = self


def test_gc_ignores_models_once_ready_and_after_a_reload(tmp_path: Path) -> None:
    """Otherwise the garbage collector would look through its models."""
    shutil.copytree(TINY, tmp_path / "models" / "tiny")
    chosen = settings(api_key="sesame").model_copy(update={"models": tmp_path / "models"})
    gc.unfreeze()
    with serving(chosen) as client:
        assert not models_scanned_by_gc()
        renewed(tmp_path / "models" / "tiny", "second")
        assert client.post("/models/reload", headers={"X-API-Key": "sesame"}).json()["models"] == {"tiny": "replaced"}
        assert not models_scanned_by_gc()


def test_freezing_again_frees_garbage_that_was_frozen_before() -> None:
    ring = Ring()
    gone = weakref.ref(ring)
    interpreter.collect_and_freeze()
    assert gone() is ring
    del ring
    gc.collect()
    assert gone() is not None
    interpreter.collect_and_freeze()
    assert gone() is None


def test_a_starting_server_shortens_the_thread_switch_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    class Far(Exception):
        """Ends the start of the server at this point."""

    def stop(*_: object) -> None:
        raise Far

    monkeypatch.setattr(server, "serve", stop)
    before = sys.getswitchinterval()
    try:
        with pytest.raises(Far):
            commands._serve_on(settings(), None, None)  # type: ignore[arg-type]  # neither is reached
        assert sys.getswitchinterval() == pytest.approx(interpreter.SWITCH_INTERVAL)
        assert sys.getswitchinterval() < before
    finally:
        sys.setswitchinterval(before)


def models_scanned_by_gc() -> list[object]:
    return [each for each in gc.get_objects() if type(each) is Served]
