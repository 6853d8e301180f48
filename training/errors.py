"""What can go wrong in training, as errors whose text says what to do. The command line prints them without a traceback."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class TrainingError(Exception):
    """The base of all of them: exit status 2 unless a subclass says otherwise."""

    exit_status = 2


class UnknownNameError(TrainingError):
    """A preset, routing, schedule, ... that does not exist; the text lists those that do."""

    def __init__(self, what: str, name: str, valid: Iterable[str]) -> None:
        super().__init__(f"unknown {what} {name!r}; choose one of: {', '.join(sorted(valid))}")


def chosen(what: str, name: str, choices: Mapping[str, T]) -> T:
    """What a table calls by this name."""
    if name not in choices:
        raise UnknownNameError(what, name, choices)
    return choices[name]


class SettingError(TrainingError):
    """A number outside the range that makes sense."""


class DataError(TrainingError):
    """A data file that is missing, truncated or not what its name says."""


class CheckpointError(TrainingError):
    """A checkpoint that is missing, of another config, or that could not be written."""


class DivergedError(TrainingError):
    """The loss stopped being a number."""

    exit_status = 3


class StoppedError(TrainingError):
    """A signal ended the run early; its checkpoint is whole."""

    exit_status = 130


class ExportError(TrainingError):
    """The exported graph is not what the bundle contract asks for."""
