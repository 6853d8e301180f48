"""What the processes of one server tell each other by signals, and what a signal from outside means to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

SPREAD = signal.SIGUSR1  # from a worker to its supervisor: let all reload
REPLACE_ME = 4  # exit status of a worker that wants to be replaced; uvicorn's own is 3


def reload_on_hangup() -> bool:
    """SIGHUP reloads, unless we run in a terminal: there it means that the terminal was closed, and ends us."""
    from_terminal = sys.stdin is not None and sys.stdin.isatty()  # it is None where it was closed
    return multiprocessing.parent_process() is not None or not from_terminal


_early: list[int] = []  # hangups that came before there was anybody to reload


def hold_hangups() -> None:
    """Notes them, for let_hangups_in: a SIGHUP ends a process that has no handler for it yet."""
    if reload_on_hangup():
        signal.signal(signal.SIGHUP, lambda number, _: _early.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def let_hangups_in() -> None:
    """Those that came early reach the handler that the process has by now."""
    if _early:
        _early.clear()
        signal.raise_signal(signal.SIGHUP)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """A child that is started inside has those of a terminal wait until it can take them; so do we, for a moment."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Siblings:
    """The other processes behind the same address: here those of one supervisor, if there is one."""

    async def let_all_reload(self) -> None:
        """This process has reloaded: its supervisor has all do it, and for those that have there is nothing to do."""
        supervisor = multiprocessing.parent_process()
        if supervisor is not None and supervisor.pid is not None:
            with suppress(ProcessLookupError):  # it is gone, and this worker is about to follow
                os.kill(supervisor.pid, SPREAD)

    async def metrics(self, own: Callable[[], Awaitable[bytes]]) -> bytes:
        """The metrics of all. Workers keep theirs in common files, so that what one of them tells is the sum already."""
        return await own()
