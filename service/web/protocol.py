"""HTTP/1.1 on one connection, where uvicorn's own has no bounds: how large a request's head may be, and how long it may take.

Nor has it a bound to how long an answer may lie unread. An offer to speak another protocol (h2c, websocket) is passed over, as
RFC 9110 7.8 allows: the request itself is answered.
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
MOST_HEADERS = 256  # each takes thirty times the bytes that an empty one has on the wire
AHEAD, PIECE = 16, 1 << 12  # requests that may wait for their turn on a connection, or as many as so many bytes more hold
NO_PATH = re.compile(rb"\A(https?://[^/?#]+)([?#].*)?\Z", re.IGNORECASE | re.DOTALL)  # means the path /, RFC 9112 3.2.2
HANDSHAKE = b"\x16"  # with which TLS begins
HTTP_2 = b"PRI * HTTP/2"  # as clients begin that know no other
LINGER = 1.0  # seconds in which a client that still sends may read why it was refused; closed at once, it might see a reset alone


class Protocol(HttpToolsProtocol):
    def __init__(
        self, *uvicorns: Any, patience: float, count: Callable[[ServiceError], None], bodies: Bodies, **own: Any
    ) -> None:
        """`patience` is the seconds that a head may take, and in which some of an answer must be read; `count` is told what is
        refused here, where the app does not see it, and `bodies` what of answers waits to be read."""
        super().__init__(*uvicorns, **own)
        self.parser = self._new_parser()
        self._patience, self._count, self._bodies = patience, count, bodies
        self._head = 0  # bytes since a head was complete, or a part of a body was there
        self._in_head = self._in_body = False
        self._head_timer: TimerHandle | None = None
        self._reader_timer: TimerHandle | None = None  # runs while much of an answer has not been read
        self._kept = 0  # bytes of that answer
        self._refused = False
        self._at_work: RequestResponseCycle | None = None  # whose turn it is; uvicorn knows the last alone whose head is here
        self._ahead = b""  # what a client sent that has requests enough before it

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._courteous = SimpleNamespace(write=self._write, is_closing=self.transport.is_closing, close=self._close_courteously)
        self._resume_reading = self.flow.resume_reading
        self.flow.resume_reading = self._read_if_nothing_is_ahead  # type: ignore[method-assign]  # uvicorn calls it at every answer
        self._expect_head()

    @property
    def begins(self) -> bool:
        """Whether a request is on its way: some of its head is here, or the connection is so new that none of one can be."""
        return not self._refused and (self._in_head or self.cycle is None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        self._ahead = b""
        self.resume_writing()  # nobody is expected to read any more
        if self._at_work is not None and not self._at_work.response_complete:
            self._at_work.disconnected = True
            self._at_work.message_event.set()
        super().connection_lost(exc)
        self._let_go()

    def _let_go(self) -> None:
        """Of the circles that this connection and its requests make: heads and what was not read of bodies would stay until the
        garbage collector looks through all that is old, which after some thousand connections are hundreds of megabytes."""
        self._unset_keepalive_if_required()  # uvicorn does so only where the connection was not reset
        del self.flow.resume_reading
        self.pipeline.clear()
        self._at_work = self._courteous = self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._read_on(self._ahead + data)

    def _read_on(self, data: bytes) -> None:
        """As far as there is room for requests."""
        at = 0
        try:
            while at < len(data) and not self._refused and len(self.pipeline) < AHEAD:
                most = MOST_HEAD - self._head
                piece = data[at : at + (most if self._in_body else min(most, PIECE))]
                at += len(piece)
                self._head += len(piece)
                self._parse(piece)
                if self._head == MOST_HEAD:
                    raise HeadTooLarge(f"the request's head is larger than {MOST_HEAD:,} bytes; send less")
        except ServiceError as error:
            self._refuse(error)
        self._ahead = b"" if self._refused else data[at:]
        if self._ahead:
            self.flow.pause_reading()
            self._forget_timer()  # now it is we who take time
        elif self._in_head and self._head_timer is None and not self._refused:
            self._expect_head()

    def _read_if_nothing_is_ahead(self) -> None:
        if not self._ahead:
            self._resume_reading()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as pause:  # it takes no body for such a request: told again, without the offer
                head = self._head_without_offer()
                self.parser = self._new_parser()
                data = head + data[pause.args[0] :]
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, ServiceError):  # raised in one of the callbacks below
                    raise error.__context__ from None
                raise MalformedRequest(_not_understood(error, data, first=self.cycle is None)) from None

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        return parser

    def _head_without_offer(self) -> bytes:
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"\r\n".join((line, *(b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"), b"", b""))

    # What the parser tells

    def on_message_begin(self) -> None:
        self._in_head = True
        self._unset_keepalive_if_required()  # not by mere line ends, with which a client could keep us for ever
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which uvicorn would add to the headers of a request that is under way
            if len(self.headers) == MOST_HEADERS:
                raise HeadTooLarge(f"the request has more than {MOST_HEADERS} headers; send fewer")
            super().on_header(name, value.rstrip(b" \t"))  # no part of it, RFC 9112 5.1; what is before it the parser leaves out

    def on_headers_complete(self) -> None:
        if not self.url.startswith(b"/"):
            self.url = NO_PATH.sub(rb"\1/\2", self.url)
        if self.parser.should_upgrade():
            return self._pass_over_offer()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise MalformedRequest(f"expected one Host header (RFC 9112 3.2), found {hosts}")
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            raise MalformedRequest("chunked is the only transfer coding read; send the body so, or with its Content-Length")
        if self.parser.get_http_version() == "1.0":  # which knows no 100 Continue, RFC 9110 10.1.1
            self.expect_100_continue = False
        self._in_head, self._in_body, self._head = False, True, 0
        self._forget_timer()
        self._unset_keepalive_if_required()  # set since, where the answer before was given while this head came
        super().on_headers_complete()
        self.cycle.transport = self._courteous  # type: ignore[assignment]  # these three methods are all that it asks for

    def _pass_over_offer(self) -> None:
        if all(name != b"upgrade" for name, _ in self.headers):
            raise MalformedRequest("this server is no proxy, so it takes no CONNECT")

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._in_body, self._head = False, 0
            self._forget_timer()
            self.cycle.scope[visits.WHOLE] = time.monotonic()  # type: ignore[literal-required]
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope[visits.TURN] = time.monotonic()  # type: ignore[literal-required]
        self._at_work = cycle
        super()._start_asgi_task(cycle, app)

    # Answers that are there before all of the request is

    def on_response_complete(self) -> None:
        unheard = self._in_body and not self.pipeline  # else the body is that of another, whose turn comes
        if self._at_work is not None:
            self._at_work.body.clear()  # which nobody will read, however long the client stays
        super().on_response_complete()
        if unheard:
            self._expect_end()
        goes_on = self.cycle.keep_alive or self._in_body  # the last whose head is here: another may follow, or its own body
        if self._ahead and goes_on and not self.transport.is_closing():
            self._read_on(self._ahead)
            self.flow.resume_reading()

    def _write(self, data: bytes) -> None:
        """Not to a client that has gone: of several requests that it sent at once uvicorn tells only the last."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def _close_courteously(self) -> None:
        """As the app's answer or its client wants it; but one that still sends reads the answer only then, and closed at once it
        might see a reset alone."""
        if not self._in_body:
            return self.transport.close()
        self._refused = True
        self.transport.write_eof()
        self._expect_end()

    def _expect_end(self) -> None:
        """Nobody wants what still comes."""
        self._forget_timer()
        self._head_timer = self.loop.call_later(self._patience, self.transport.close)

    # Answers that nobody reads

    def pause_writing(self) -> None:
        super().pause_writing()
        self._kept = self.transport.get_write_buffer_size()
        self._bodies.unread += self._kept
        self._expect_reader()

    def resume_writing(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
        self._bodies.unread -= self._kept
        self._kept = 0
        super().resume_writing()

    def _expect_reader(self) -> None:
        self._reader_timer = self.loop.call_later(self._patience, self._check_reader, self.transport.get_write_buffer_size())

    def _check_reader(self, before: int) -> None:
        """However slow a client is, it may go on; but one that reads nothing would have us keep its answers for ever."""
        if self.transport.get_write_buffer_size() < before:
            return self._expect_reader()
        error = TooSlow(f"no part of an answer was read for {self._patience:g} seconds; read it faster")
        logger.info("cut off: %s", error.detail)
        self._count(error)
        self.transport.abort()

    # Heads that are too slow, and what is refused

    def _expect_head(self) -> None:
        error = TooSlow(f"the request's head did not arrive in {self._patience:g} seconds; send it faster")
        self._head_timer = self.loop.call_later(self._patience, self._refuse, error)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ServiceError) -> None:
        """Nothing more is read. What was asked before is answered; then the connection closes."""
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and self._in_body:  # it is the rest of one that has its answer
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
            self._answer(error, visit)
        elif in_body and self.pipeline:  # when its turn comes
            cycle.keep_alive = False
            self.pipeline[0] = cycle, self._told(error, visit)  # type: ignore[assignment]
        elif in_body:  # it is this one's body that is wrong
            cycle.scope[REFUSED] = error.status  # type: ignore[literal-required]
            cycle.disconnected = True
            cycle.message_event.set()
            self._answer(error, visit)
        else:
            cycle.keep_alive = False

    def _visit(self, in_body: bool) -> Visit:
        """Of the request that is refused: the one at hand, or one whose head is not all here."""
        if not in_body:
            return visits.named(self.headers if self._in_head else [])
        scope: Any = self.cycle.scope
        visit: Visit = scope.setdefault(visits.SCOPE_KEY, visits.named(scope["headers"]))
        return visit

    def _told(self, error: ServiceError, visit: Visit) -> Response:
        told = problems.of(error)
        told.raw_headers.extend(visit.headers())
        return told

    def _answer(self, error: ServiceError, visit: Visit) -> None:
        if self.transport.is_closing():
            return
        told = self._told(error, visit)
        told.headers["connection"] = "close"
        headers = b"".join(b"%s: %s\r\n" % header for header in (*self.server_state.default_headers, *told.raw_headers))
        body = b"" if self.parser.get_method() == b"HEAD" else told.body
        self.transport.write(b"".join((STATUS_LINE[error.status], headers, b"\r\n", body)))
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)


def _not_understood(error: httptools.HttpParserError, data: bytes, first: bool) -> str:
    """What to send in place of this data; `first`: nothing was asked on the connection before."""
    if any(isinstance(each, httptools.HttpParserInvalidURLError) for each in (error, error.__context__)):
        return "expected an address that begins with / and is all ASCII; write \u00e9, for example, as %C3%A9"
    if first and data.startswith(HANDSHAKE):
        return "expected a request as HTTP/1.1 has it (RFC 9112), and no TLS on this port"
    if data.startswith(HTTP_2):
        return "expected HTTP/1.1, found HTTP/2; gRPC is not spoken here, /v2 is over HTTP/1.1"
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return "expected an HTTP method, such as GET or POST, in capitals"
    if str(error).startswith("Expected HTTP/"):
        return "expected HTTP/1.1 after the address; write a space in an address as %20"
    return f"expected a request as HTTP/1.1 has it (RFC 9112); found: {error}"
