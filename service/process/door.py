"""The door: all who have connected are let in, many at each turn of the loop, and the last of them before it closes.

uvloop's own server lets in one a turn. Turns are long under load, so others wait in the kernel's queue, where no limit and no
figure of ours sees them; and whoever is there when the port closes is reset, with what has been asked already.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections in the kernel's queue
A_TURN = 100  # connections let in before others have their turn
PAUSE = 1.0  # seconds until somebody else may have left, where there is no room for one more
# Faults of the one connection that would have been next, as accept(2) lists them; all others are ours, and last.
ITS_OWN = {
    *(errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.EOPNOTSUPP, errno.ENETUNREACH, getattr(errno, "ENONET", None)),  # the last is Linux's
}
NO_FILES = (errno.EMFILE, errno.ENFILE)


class Door:
    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener, self._protocol = listener, protocol
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[None]] = set()
        self._full: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._watch()

    async def close(self) -> None:
        """Nobody more is let in, and those who had connected are in, as many as there is room for."""
        if self._full is not None:
            self._full.cancel()
        self._loop.remove_reader(self._listener)
        if error := self._let_some_in(BACKLOG + 1):  # as many as Linux lets wait
            logger.error("waiting connections are reset, since no more can be accepted (%s)", error.strerror)
        self._listener.close()
        if self._coming:
            await asyncio.wait(self._coming)

    def _watch(self) -> None:
        self._full = None
        self._loop.add_reader(self._listener, self._answer_the_door)

    def _answer_the_door(self) -> None:
        if error := self._let_some_in(A_TURN):
            advice = "; raise the limit, as with ulimit -n" if error.errno in NO_FILES else ""
            logger.error("connections wait, since no more can be accepted (%s)%s", error.strerror, advice)
            self._loop.remove_reader(self._listener)
            self._full = self._loop.call_later(PAUSE, self._watch)

    def _let_some_in(self, most: int) -> OSError | None:
        """Why no more can be, if that is so: each connection is an open file, say, and a process may have only so many."""
        for _ in range(most):
            try:
                self._let_in(self._listener.accept()[0])
            except BlockingIOError:  # that was all
                return None
            except OSError as error:
                if error.errno not in ITS_OWN:
                    return error
        return None

    def _let_in(self, connection: socket.socket) -> None:
        coming = self._loop.create_task(self._connect(connection))
        self._coming.add(coming)
        coming.add_done_callback(self._coming.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # it has gone meanwhile
            connection.close()
