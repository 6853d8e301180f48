"""The door accepts connections: many in each turn of the event loop, and all that have been made before it closes.

uvloop's own server accepts one connection a turn. Turns are long under load, so the others wait in the kernel's accept queue,
where none of our limits and metrics see them. Whoever is still there when the port closes is reset, though they may have sent
their request already.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import socket
import struct
import sys
from collections.abc import Callable

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections in the kernel's accept queue
ACCEPTS_PER_TURN = 100  # connections accepted before the event loop turns to others
PAUSE = 1.0  # seconds to the next try where no file descriptor was left for a connection
HANDSHAKE = 0.002  # seconds in which the connection of a load balancer nearby is made
# Errors of the one connection that was next, as accept(2) lists them. All others are our own, and do not go away.
CONNECTION_ERRORS = {
    *(errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.EOPNOTSUPP, errno.ENETUNREACH, getattr(errno, "ENONET", None)),  # the last is Linux's
}
NO_FILES = (errno.EMFILE, errno.ENFILE)
SO_ATTACH_FILTER = 26  # Linux's; the socket module does not name it
# A filter of packets that drops those which open a connection: code, jump if true, jump if false, operand (linux/filter.h).
INSTRUCTION = struct.Struct("HBBI")
NO_SYN = b"".join(
    INSTRUCTION.pack(*each)
    for each in [
        (0x30, 0, 0, 13),  # load the byte of TCP's flags
        (0x45, 0, 1, 0x02),  # is SYN among them?
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep
    ]
)


class Door:
    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener, self._protocol = listener, protocol
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._watch()

    async def close(self) -> None:
        """Accepts all who have connected, as far as there are file descriptors for them, and nobody after that."""
        if drop_newcomers(self._listener):
            await asyncio.sleep(HANDSHAKE)
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        if error := self._accept_up_to(BACKLOG + 1):  # the most that Linux queues
            logger.error("waiting connections are reset, since no more can be accepted (%s)", error.strerror)
        self._listener.close()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _watch(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._on_connections)

    def _on_connections(self) -> None:
        if error := self._accept_up_to(ACCEPTS_PER_TURN):
            advice = "; raise the limit, as with ulimit -n" if error.errno in NO_FILES else ""
            logger.error("connections wait, since no more can be accepted (%s)%s", error.strerror, advice)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(PAUSE, self._watch)

    def _accept_up_to(self, most: int) -> OSError | None:
        """Accepts at most so many; returns the error where no more can be accepted, as when no file descriptor is left."""
        for _ in range(most):
            try:
                self._let_in(self._listener.accept()[0])
            except BlockingIOError:  # the queue is empty
                return None
            except OSError as error:
                if error.errno not in CONNECTION_ERRORS:
                    return error
        return None

    def _let_in(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client has gone meanwhile
            connection.close()


def drop_newcomers(listener: socket.socket) -> bool:
    """Has the kernel drop SYNs, so that nobody connects between the last accept() and close(), to be reset; False if it cannot.

    Their system sends the SYN again after a second: then they are refused, or another worker accepts them, a second late. Newer
    kernels ask for CAP_NET_ADMIN; without it, and elsewhere than on Linux, those few microseconds remain.
    """
    if sys.platform != "linux":
        return False
    instructions = ctypes.create_string_buffer(NO_SYN, len(NO_SYN))
    program = struct.pack("HP", len(NO_SYN) // INSTRUCTION.size, ctypes.addressof(instructions))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    except OSError:
        return False
    return True
