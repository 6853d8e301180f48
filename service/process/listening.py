"""The port, bound early so that a port in use is reported before models load; nobody can connect before a server listens."""

from __future__ import annotations

import errno
import resource
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any

from service.errors import StartError


def claim(host: str, port: int) -> ExitStack:
    """Claim a bound address for as long as nobody may be listening on it.

    During that time TCP lets other servers bind it too, and workers that start to listen later would share it with theirs. The
    claim is an abstract Unix socket: it ends with its process and belongs to the network namespace, as ports do. Where such
    sockets are not available nothing is claimed.
    """
    claimed = ExitStack()
    if sys.platform == "linux":
        try:
            claimed.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0capserve {host} {port}")
        except OSError as error:
            claimed.close()
            if error.errno == errno.EADDRINUSE:
                raise _listening_error(host, port, "another capserve has claimed it, though it may not listen yet") from error
    return claimed


def bind(host: str, port: int) -> socket.socket:
    return _bound(host, port, shared=False)


def reserve(host: str, port: int) -> socket.socket:
    """Reserve a port that workers share, each with its own socket: the kernel spreads connections evenly over these, while
    from a single shared socket the first worker to wake would take them all."""
    with _bound(host, port, shared=False) as probe:  # a shared bind would also succeed beside another capserve
        port = probe.getsockname()[1]
    return _bound(host, port, shared=True)


def join(address: tuple[str, int]) -> socket.socket:
    """Bind one more socket to a reserved port."""
    return _bound(*address, shared=True)


def numeric_address(address: tuple[Any, ...]) -> tuple[str, int]:
    """Return a socket's address as numeric host and port; a link-local host names its interface."""
    host, _ = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return host, address[1]


def url(address: tuple[Any, ...]) -> str:
    host, port, *_ = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_file_limit() -> None:
    """Raise the limit on open files as far as allowed: every connection is one, and the default limit is 1,024."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # where there is no maximum, as on macOS
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> StartError:
    return _listening_error(host, port, str(error.strerror if isinstance(error, OSError) else error))


def _listening_error(host: str, port: int, reason: str) -> StartError:
    return StartError(f"cannot listen on {host}:{port}: {reason}; choose another with CAPSERVE_HOST or CAPSERVE_PORT")


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
    """Resolve the host, preferring IPv4 where a name such as localhost has both: clients fall back to it if IPv6 fails."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a name at all
        raise cannot_listen(host, port, error) from error
    return min(addresses, key=lambda each: each[0] != socket.AF_INET)
