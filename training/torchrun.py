"""Reads what torchrun sets in the environment of each process that it starts; imports no torch."""

from __future__ import annotations

import os

from training.errors import SettingError

WORLD = "WORLD_SIZE"


def several() -> bool:
    """Whether this process is one of several; does not check that WORLD_SIZE is a number."""
    return os.environ.get(WORLD) not in (None, "", "1")


def world() -> int:
    """How many processes train together."""
    return _number(WORLD, 1)


def local_rank() -> int:
    """The index of this process among those on this machine."""
    return _number("LOCAL_RANK", 0)


def _number(name: str, otherwise: int) -> int:
    value = os.environ.get(name) or otherwise
    try:
        return int(value)
    except ValueError:
        raise SettingError(f"expected a number in {name}, as torchrun sets it, found {value!r}") from None
