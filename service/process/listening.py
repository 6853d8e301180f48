"""The port. Bound early, so that a taken one is told before models load; nobody is let in before a server listens."""

from __future__ import annotations

import errno
import resource
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any

from service.errors import StartError


def claim(host: str, port: int) -> ExitStack:
    """An address that is bound, for as long as nobody may listen there: so long TCP lets others bind it too, and workers that
    come to listen would share it with others'.

    A name that ends with its process, and is the network's, as ports are; where there are no such names nothing is claimed.
    """
    claimed = ExitStack()
    if sys.platform == "linux":
        try:
            claimed.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0capserve {host} {port}")
        except OSError as error:
            claimed.close()
            if error.errno == errno.EADDRINUSE:
                raise _no_listening(host, port, "another capserve has claimed it, though it may not listen yet") from error
    return claimed


def bind(host: str, port: int) -> socket.socket:
    return _bound(host, port, shared=False)


def reserve(host: str, port: int) -> socket.socket:
    """A port that workers can share. The kernel deals connections out evenly to sockets of their own; from one socket in
    common the first worker awake would take them all."""
    with _bound(host, port, shared=False) as probe:  # a shared bind would also succeed beside another capserve
        port = probe.getsockname()[1]
    return _bound(host, port, shared=True)


def join(address: tuple[str, int]) -> socket.socket:
    """One more socket on a reserved port."""
    return _bound(*address, shared=True)


def numbers(address: tuple[Any, ...]) -> tuple[str, int]:
    """A socket's address as host and port; the host says which link is meant, where the address alone does not."""
    host, _ = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return host, address[1]


def url(address: tuple[Any, ...]) -> str:
    host, port, *_ = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def take_all_files() -> None:
    """A connection is an open file, and of those a process has 1,024 where nobody asks for all that it may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # where none is the most, as on a Mac
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> StartError:
    return _no_listening(host, port, str(error.strerror if isinstance(error, OSError) else error))


def _no_listening(host: str, port: int, why: str) -> StartError:
    return StartError(f"cannot listen on {host}:{port}: {why}; choose another with CAPSERVE_HOST or CAPSERVE_PORT")


def _bound(host: str, port: int, shared: bool) -> socket.socket:
    family, kind, protocol, _, address = _resolved(host, port)
    try:
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return bound


def _resolved(host: str, port: int) -> tuple[Any, ...]:
    """Of a name with both kinds of address, as localhost, the one that is tried where the other is not to be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # the latter of a host that is no name at all
        raise cannot_listen(host, port, error) from error
    return min(found, key=lambda each: each[0] != socket.AF_INET)
