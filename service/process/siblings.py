"""What the processes of one server tell each other by signals, and what a signal from outside means to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

RELOAD_ALL = signal.SIGUSR1  # from a worker to its supervisor: make all workers reload
REPLACE_ME = 4  # exit status of a worker that wants to be replaced; uvicorn's own is 3


def hangup_reloads() -> bool:
    """Whether SIGHUP reloads: to a process run from a terminal it means that the terminal was closed, and ends it."""
    from_terminal = sys.stdin is not None and sys.stdin.isatty()  # None: it was closed
    return multiprocessing.parent_process() is not None or not from_terminal


_held_hangups: list[int] = []  # hangups that came before there was a handler that reloads


def hold_hangups() -> None:
    """Record SIGHUPs for release_hangups: without a handler they would end the process."""
    if hangup_reloads():
        signal.signal(signal.SIGHUP, lambda number, _: _held_hangups.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def release_hangups() -> None:
    """Raise SIGHUP again if it came early, for the handler that the process has by now."""
    if _held_hangups:
        _held_hangups.clear()
        signal.raise_signal(signal.SIGHUP)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals of a terminal for a moment; in a child started meanwhile they wait until it can handle them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Siblings:
    """The other processes behind the same address: here the workers of the same supervisor, if there is one."""

    async def let_all_reload(self) -> None:
        """After a reload here, ask the supervisor to make all workers reload; those that have already find nothing to do."""
        supervisor = multiprocessing.parent_process()
        if supervisor is not None and supervisor.pid is not None:
            with suppress(ProcessLookupError):  # the supervisor is gone, and this worker is about to end
                os.kill(supervisor.pid, RELOAD_ALL)

    async def metrics(self, own: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the metrics of all. Workers keep theirs in common files, so `own` gives the sum already."""
        return await own()
