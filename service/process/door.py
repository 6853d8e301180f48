"""The door: all who have connected are let in, many at each turn of the loop, and the last of them before it closes.

uvloop's own server lets in one a turn. Turns are long under load, so others wait in the kernel's queue, where no limit and no
figure of ours sees them; and whoever is there when the port closes is reset, with what has been asked already.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections in the kernel's queue
A_TURN = 100  # connections let in before others have their turn
PAUSE = 1.0  # seconds until somebody else may have left, where there is no room for one more


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
        """Nobody more is let in, and those who had connected are in."""
        for each in self._connected(BACKLOG):
            self._let_in(each)
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._full is not None:
            self._full.cancel()
        await asyncio.gather(*self._coming)

    def _watch(self) -> None:
        self._full = None
        self._loop.add_reader(self._listener, self._answer_the_door)

    def _answer_the_door(self) -> None:
        for each in self._connected(A_TURN):
            self._let_in(each)

    def _connected(self, most: int) -> list[socket.socket]:
        found: list[socket.socket] = []
        try:
            while len(found) < most:
                found.append(self._listener.accept()[0])
        except (BlockingIOError, ConnectionAbortedError):  # that was all, or one has gone again
            pass
        except OSError as error:  # each connection is an open file, and a process may have only so many
            logger.error("connections wait, since no more can be taken (%s); raise the limit, as with ulimit -n", error.strerror)
            self._loop.remove_reader(self._listener)
            self._full = self._loop.call_later(PAUSE, self._watch)
        return found

    def _let_in(self, connection: socket.socket) -> None:
        coming = self._loop.create_task(self._connect(connection))
        self._coming.add(coming)
        coming.add_done_callback(self._coming.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # it has gone meanwhile
            connection.close()
