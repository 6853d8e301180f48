"""HTTP/1.1 on one connection, with limits that uvicorn lacks: on a head's size and time, and on how long an answer lies unread.

An offer of another protocol (h2c, websocket) is ignored, as RFC 9110 7.8 allows: the request itself is answered.
"""

from __future__ import annotations

import logging
import re
import time
from asyncio import BaseTransport, TimerHandle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service import visits
from service.errors import HeadTooLarge, MalformedRequest, ServiceError, TooSlow
from service.visits import Visit
from service.web import problems
from service.web.bodies import Bodies
from service.web.problems import REFUSED

logger = logging.getLogger(__name__)

MOST_HEAD = 1 << 16  # bytes of a request line and its headers, or of the trailers after a body
MOST_HEADERS = 256  # an empty one takes thirty times as many bytes in memory as on the wire
MOST_QUEUED, PIECE = 16, 1 << 12  # requests that may wait for their turn on a connection, and as many more as so many bytes hold
NO_PATH = re.compile(rb"\A(https?://[^/?#]+)([?#].*)?\Z", re.IGNORECASE | re.DOTALL)  # means the path /, RFC 9112 3.2.2
TLS_HANDSHAKE = b"\x16"  # the first byte of TLS
HTTP_2 = b"PRI * HTTP/2"  # how clients begin that speak only HTTP/2
LINGER = 1.0  # seconds for a client that still sends to read why it was refused: if closed at once, it might see only a reset


class Protocol(HttpToolsProtocol):
    def __init__(self, *args: Any, patience: float, count: Callable[[ServiceError], None], bodies: Bodies, **kwargs: Any) -> None:
        """`patience` is the seconds within which a head must arrive and part of an answer must be read; `count` is called with
        what is refused here, which the app does not see, and `bodies` counts the bytes of answers that wait to be read."""
        super().__init__(*args, **kwargs)
        self.parser = self._new_parser()
        self._patience, self._count, self._bodies = patience, count, bodies
        self._head_bytes = 0  # bytes since the last complete head or piece of a body
        self._in_head = self._in_body = False
        self._head_timer: TimerHandle | None = None
        self._reader_timer: TimerHandle | None = None  # runs while much of an answer is unread
        self._unread = 0  # unread bytes of that answer
        self._refused = False
        # The one whose turn it is; uvicorn's `cycle` is the last whose head is here.
        self._active_cycle: RequestResponseCycle | None = None
        self._unparsed = b""  # bytes not parsed yet, since enough requests wait before them

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._courteous_transport = SimpleNamespace(
            write=self._write, is_closing=self.transport.is_closing, close=self._close_courteously
        )
        self._resume_reading = self.flow.resume_reading
        self.flow.resume_reading = self._resume_if_all_is_parsed  # type: ignore[method-assign]  # uvicorn calls it at every answer
        self._expect_head()

    @property
    def expects_request(self) -> bool:
        """Whether a request is on its way: part of its head is here, or the connection is so new that none may have arrived."""
        return not self._refused and (self._in_head or self.cycle is None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        self._unparsed = b""
        self.resume_writing()  # ends the wait for a reader
        if self._active_cycle is not None and not self._active_cycle.response_complete:
            self._active_cycle.disconnected = True
            self._active_cycle.message_event.set()
        super().connection_lost(exc)
        self._break_reference_cycles()

    def _break_reference_cycles(self) -> None:
        """Break the reference cycles between this connection and its requests: heads and unread bodies would stay in memory until
        the garbage collector scans its oldest generation, hundreds of megabytes after some thousand connections."""
        self._unset_keepalive_if_required()  # uvicorn does so only where the connection was not reset
        del self.flow.resume_reading
        self.pipeline.clear()
        self._active_cycle = self._courteous_transport = self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._read_on(self._unparsed + data)

    def _read_on(self, data: bytes) -> None:
        """Parse `data` as far as there is room for its requests, and keep the rest."""
        at = 0
        try:
            while at < len(data) and not self._refused and len(self.pipeline) < MOST_QUEUED:
                most = MOST_HEAD - self._head_bytes
                piece = data[at : at + (most if self._in_body else min(most, PIECE))]
                at += len(piece)
                self._head_bytes += len(piece)
                self._parse(piece)
                if self._head_bytes == MOST_HEAD:
                    raise HeadTooLarge(f"the request's head is larger than {MOST_HEAD:,} bytes; send less")
        except ServiceError as error:
            self._refuse(error)
        self._unparsed = b"" if self._refused else data[at:]
        if self._unparsed:
            self.flow.pause_reading()
            self._forget_timer()  # from now on the delay is ours
        elif self._in_head and self._head_timer is None and not self._refused:
            self._expect_head()

    def _resume_if_all_is_parsed(self) -> None:
        if not self._unparsed:
            self._resume_reading()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as pause:  # it takes no body for such a request: parsed again, without the offer
                head = self._head_without_upgrade()
                self.parser = self._new_parser()
                data = head + data[pause.args[0] :]
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, ServiceError):  # raised in one of the callbacks below
                    raise error.__context__ from None
                raise MalformedRequest(_advice(error, data, first=self.cycle is None)) from None

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        return parser

    def _head_without_upgrade(self) -> bytes:
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"\r\n".join((line, *(b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"), b"", b""))

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self._in_head = True
        self._unset_keepalive_if_required()  # not for mere line ends, with which a client could stay for ever
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # otherwise it is a trailer, which uvicorn would add to the headers of a request that is under way
            if len(self.headers) == MOST_HEADERS:
                raise HeadTooLarge(f"the request has more than {MOST_HEADERS} headers; send fewer")
            super().on_header(name, value.rstrip(b" \t"))  # no part of it, RFC 9112 5.1; the parser strips leading space

    def on_headers_complete(self) -> None:
        if not self.url.startswith(b"/"):
            self.url = NO_PATH.sub(rb"\1/\2", self.url)
        if self.parser.should_upgrade():
            return self._ignore_upgrade()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise MalformedRequest(f"expected one Host header (RFC 9112 3.2), found {hosts}")
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            raise MalformedRequest("chunked is the only transfer coding read; send the body so, or with its Content-Length")
        if self.parser.get_http_version() == "1.0":  # it has no 100 Continue, RFC 9110 10.1.1
            self.expect_100_continue = False
        self._in_head, self._in_body, self._head_bytes = False, True, 0
        self._forget_timer()
        self._unset_keepalive_if_required()  # set if the previous answer was completed while this head came
        super().on_headers_complete()
        self.cycle.transport = self._courteous_transport  # type: ignore[assignment]  # it uses only these three methods

    def _ignore_upgrade(self) -> None:
        if all(name != b"upgrade" for name, _ in self.headers):
            raise MalformedRequest("this server is no proxy, so it takes no CONNECT")

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._in_body, self._head_bytes = False, 0
            self._forget_timer()
            self.cycle.scope[visits.COMPLETE] = time.monotonic()  # type: ignore[literal-required]
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope[visits.TURN] = time.monotonic()  # type: ignore[literal-required]
        self._active_cycle = cycle
        super()._start_asgi_task(cycle, app)

    # Answers given before the whole request is here

    def on_response_complete(self) -> None:
        rest_unwanted = self._in_body and not self.pipeline  # otherwise the body is that of a later request, whose turn comes
        if self._active_cycle is not None:
            self._active_cycle.body.clear()  # nobody will read it, however long the client stays
        super().on_response_complete()
        if rest_unwanted:
            self._expect_end()
        goes_on = self.cycle.keep_alive or self._in_body  # the last whose head is here: its body or another may follow
        if self._unparsed and goes_on and not self.transport.is_closing():
            self._read_on(self._unparsed)
            self.flow.resume_reading()

    def _write(self, data: bytes) -> None:
        """Write unless the client has gone: of several requests that it sent at once uvicorn tells only the last."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def _close_courteously(self) -> None:
        """Close, as the app's answer or its client asks. A client that is still sending gets time to finish: it reads the answer
        only afterwards, and if closed at once it might see only a reset."""
        if not self._in_body:
            return self.transport.close()
        self._refused = True
        self.transport.write_eof()
        self._expect_end()

    def _expect_end(self) -> None:
        """Give the rest of a body that nobody wants `patience` seconds, then close."""
        self._forget_timer()
        self._head_timer = self.loop.call_later(self._patience, self.transport.close)

    # Answers that nobody reads

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._bodies.unread += self._unread
        self._expect_reader()

    def resume_writing(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
        self._bodies.unread -= self._unread
        self._unread = 0
        super().resume_writing()

    def _expect_reader(self) -> None:
        self._reader_timer = self.loop.call_later(self._patience, self._check_reader, self.transport.get_write_buffer_size())

    def _check_reader(self, before: int) -> None:
        """Let a client go on however slowly it reads, but cut off one that reads nothing: its answers would be kept for ever."""
        if self.transport.get_write_buffer_size() < before:
            return self._expect_reader()
        error = TooSlow(f"no part of an answer was read for {self._patience:g} seconds; read it faster")
        logger.info("cut off: %s", error.detail)
        self._count(error)
        self.transport.abort()

    # Slow heads, and refusals

    def _expect_head(self) -> None:
        error = TooSlow(f"the request's head did not arrive in {self._patience:g} seconds; send it faster")
        self._head_timer = self.loop.call_later(self._patience, self._refuse, error)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ServiceError) -> None:
        """Read nothing more, answer what was asked before, then close the connection."""
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and self._in_body:  # in the rest of one that has its answer
            return self._close_courteously()
        idle = cycle is None or cycle.response_complete
        in_body = not idle and cycle.more_body and not cycle.response_started
        visit = self._visit(in_body)
        with visits.logged(visit):
            logger.info("refused with %s: %s", error.status, error.detail)
        self._count(error)
        self._refused = True
        self._forget_timer()
        if idle:
            self._respond(error, visit)
        elif in_body and self.pipeline:  # answered when its turn comes
            cycle.keep_alive = False
            self.pipeline[0] = cycle, self._response(error, visit)  # type: ignore[assignment]
        elif in_body:  # the body of the request at work is wrong
            cycle.scope[REFUSED] = error.status  # type: ignore[literal-required]
            cycle.disconnected = True
            cycle.message_event.set()
            self._respond(error, visit)
        else:
            cycle.keep_alive = False

    def _visit(self, in_body: bool) -> Visit:
        """Return the visit of the refused request: the last one, or one whose head is incomplete."""
        if not in_body:
            return visits.new_visit(self.headers if self._in_head else [])
        scope: Any = self.cycle.scope
        visit: Visit = scope.setdefault(visits.SCOPE_KEY, visits.new_visit(scope["headers"]))
        return visit

    def _response(self, error: ServiceError, visit: Visit) -> Response:
        response = problems.of(error)
        response.raw_headers.extend(visit.headers())
        return response

    def _respond(self, error: ServiceError, visit: Visit) -> None:
        if self.transport.is_closing():
            return
        response = self._response(error, visit)
        response.headers["connection"] = "close"
        headers = b"".join(b"%s: %s\r\n" % header for header in (*self.server_state.default_headers, *response.raw_headers))
        body = b"" if self.parser.get_method() == b"HEAD" else response.body
        self.transport.write(b"".join((STATUS_LINE[error.status], headers, b"\r\n", body)))
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)


def _advice(error: httptools.HttpParserError, data: bytes, first: bool) -> str:
    """Say what to send instead of this data; `first`: nothing was asked on the connection before."""
    if any(isinstance(each, httptools.HttpParserInvalidURLError) for each in (error, error.__context__)):
        return "expected an address that begins with / and is all ASCII; write \u00e9, for example, as %C3%A9"
    if first and data.startswith(TLS_HANDSHAKE):
        return "expected a request as HTTP/1.1 has it (RFC 9112), and no TLS on this port"
    if data.startswith(HTTP_2):
        return "expected HTTP/1.1, found HTTP/2; gRPC is not spoken here, /v2 is over HTTP/1.1"
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return "expected an HTTP method, such as GET or POST, in capitals"
    if str(error).startswith("Expected HTTP/"):
        return "expected HTTP/1.1 after the address; write a space in an address as %20"
    return f"expected a request as HTTP/1.1 has it (RFC 9112); found: {error}"
