"""Errors of training, whose text says what to do; the command line prints it without a traceback."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class TrainingError(Exception):
    """Base of these errors; the exit status is 2 unless a subclass sets another."""

    exit_status = 2


class UnknownNameError(TrainingError):
    """A preset, routing, schedule, ... that does not exist; the text lists those that do."""

    def __init__(self, kind: str, name: str, valid: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; choose one of: {', '.join(sorted(valid))}")


def chosen(kind: str, name: str, choices: Mapping[str, T]) -> T:
    """Look up a name in a table, or raise an error that lists its names."""
    if name not in choices:
        raise UnknownNameError(kind, name, choices)
    return choices[name]


class SettingError(TrainingError):
    """A setting that is out of range, or does not fit the others or the machine."""


class DataError(TrainingError):
    """A data file that is missing, truncated or not what its name says."""


class CheckpointError(TrainingError):
    """A checkpoint that is missing, damaged, of another config, or could not be written."""


class DivergedError(TrainingError):
    """The loss or a weight is no longer finite."""

    exit_status = 3


class StoppedError(TrainingError):
    """A signal ended the run early; its checkpoint is whole."""

    exit_status = 130


class ExportError(TrainingError):
    """A bundle, or a figure, that cannot be made or written."""
