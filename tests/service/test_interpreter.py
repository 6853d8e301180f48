"""The interpreter's habits, seen on a real server: what stands is left alone, what is rubbish goes, threads give way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

from service.engine import CapsNet
from service.process import interpreter
from tests.service.conftest import serving, settings


class Ring:
    """Rubbish that counting references does not find."""

    def __init__(self) -> None:
        self.itself = self


def test_a_server_that_is_ready_has_settled(nets: Mapping[str, CapsNet]) -> None:
    gc.unfreeze()
    with serving(settings(), nets):
        standing, looked_through = gc.get_freeze_count(), len(gc.get_objects())
    assert standing > looked_through


def test_settling_takes_rubbish_away_even_what_an_earlier_one_left_standing() -> None:
    ring = Ring()
    gone = weakref.ref(ring)
    interpreter.settle()
    assert gone() is ring
    del ring
    gc.collect()
    assert gone() is not None
    interpreter.settle()
    assert gone() is None
