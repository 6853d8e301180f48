"""What every request gets, whichever route answers it: an id, the key check, Server-Timing, metrics, a line in the log.

Plain ASGI, in one layer instead of five, because this is on the hot path.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import time
from itertools import takewhile
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import visits
from service.errors import Busy, KeyWanted, ServiceError
from service.routes import health, inference_protocol, playground
from service.state import Service
from service.web import problems
from service.web.lateness import Lateness
from service.web.problems import CLIENT_LEFT, REFUSED

if TYPE_CHECKING:  # it needs an extra
    from service.tracing import Tracing

BASIC = 'Basic realm="capserve: any user, the key as password"'
NO_ROUTE = "none"  # in metrics and logs: there is no such path, or the request was refused before routing
LONGEST_PART, MOST_PARTS = 24, 10  # characters between two slashes, and such parts of a path, that logs and spans show
PROBES = health.PATHS | inference_protocol.HEALTH_PATHS
OPEN_PATHS = PROBES | playground.PATHS

logger = logging.getLogger("service.requests")


class Envelope:
    def __init__(self, app: ASGIApp, service: Service, tracing: Tracing | None) -> None:
        self._app = app
        self._metrics, self._catalogue, self._bodies = service.metrics, service.catalogue, service.bodies
        self._crew, self._refusals = service.crew, service.refusals
        self._tracing = tracing
        self._lateness = Lateness(service.settings.max_wait)
        keys = service.settings.api_key
        self._keys = [] if keys is None else keys.get_secret_value().encode().split(b"\n")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        client_scope, method = scope, scope["method"]
        visit = visits.begin(client_scope)
        if method == "HEAD":  # answered like GET; the server below omits the body
            scope = {**client_scope, "method": "GET"}
        status, unread = 0, 0

        async def send_stamped(message: Message) -> None:
            nonlocal status, unread
            if message["type"] == "http.response.start":
                status = message["status"]
                self._stamp(message["headers"], client_scope, status)
                self._bodies.release(visit)  # before sending, which a slow client can prolong at will
                unread = _content_length(message["headers"])
                self._bodies.unread += unread  # it waits in `send` while the client has not read the answer before
            await send(message)

        try:
            refusal = self._early_refusal(scope)
            if refusal is not None and refusal.status_code == Busy.status and self._crew.at_work:
                await self._refusals.turn()
            await (refusal or self._app)(scope, receive, send_stamped)
        except asyncio.CancelledError:  # by uvicorn, when the drain time is over; by Ray's proxy, when the client has left
            if not status and self._catalogue.draining:
                stopped = Busy("the server had to stop before this was finished; ask again", "draining")
                await self._refusal(stopped, visit)(scope, receive, send_stamped)
        except Exception:
            logger.exception("a fault of the server's own")
            if status:
                raise  # too late for an answer: uvicorn cuts the connection
            await problems.problem(500, "internal error", f"a fault of the server's own, logged as {visit.id}")(
                scope, receive, send_stamped
            )
        finally:
            self._bodies.release(visit)
            self._bodies.unread -= unread  # the connection counts what is still unread
            self._record(method, scope, visit, client_scope.get(REFUSED) or status or CLIENT_LEFT)

    def _stamp(self, headers: list[tuple[bytes, bytes]], scope: Scope, status: int) -> None:
        headers += visits.of(scope).headers()
        if scope["method"] != "POST" and all(name != b"cache-control" for name, _ in headers):
            headers.append((b"cache-control", b"no-store"))  # it is true only now, and a cache would not ask for the key
        if self._ends_connection(scope, status):
            headers.append((b"connection", b"close"))

    def _ends_connection(self, scope: Scope, status: int) -> bool:
        """Whether this answer ends the connection: while draining, because it would otherwise be closed under a client that must
        go elsewhere; and on refusing a client that waits for 100 Continue, because its body may or may not still come."""
        return self._catalogue.draining or (
            status >= 400 and visits.COMPLETE not in scope and _expects_continue(scope["headers"])
        )

    def _early_refusal(self, scope: Scope) -> Response | None:
        """Return a refusal if the key is missing, too many requests wait, or memory is short. Memory matters even without a body:
        the answer may stay unread."""
        if scope["path"] in OPEN_PATHS:
            return None
        if not self._has_valid_key(scope["headers"]):
            return self._key_wanted(scope)
        if inference_protocol.asks_whether_ready(scope["path"]):
            return None
        visit = visits.of(scope)
        try:
            self._lateness.admit(visit.arrived)
            self._bodies.admit()
        except Busy as error:
            return self._refusal(error, visit)
        return None

    def _key_wanted(self, scope: Scope) -> Response:
        has_other_key = any(_key(name, value) is not None for name, value in scope["headers"])
        prefix = "the key sent is not the server's; " if has_other_key else ""
        error = KeyWanted(f"{prefix}send the server's key as `Authorization: Bearer KEY` or `X-API-Key: KEY`")
        answer = self._refusal(error, visits.of(scope))
        by_script = any(name == b"x-requested-with" for name, _ in scope["headers"])
        if not by_script:  # the page asks its user itself; with Basic offered, the browser would ask first
            answer.headers.append("WWW-Authenticate", BASIC)
        return answer

    def _refusal(self, error: ServiceError, visit: visits.Visit) -> Response:
        visit.refusal = error.why
        self._metrics.count_refusal(error)
        return problems.of(error)

    def _has_valid_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        if not self._keys:
            return True
        sent = [key for name, value in headers if (key := _key(name, value)) is not None]
        matches = [hmac.compare_digest(known, key) for key in sent for known in self._keys]  # all, so that the time tells nothing
        return any(matches)

    def _record(self, method: str, scope: Scope, visit: visits.Visit, status: int) -> None:
        route = getattr(scope.get("route"), "path", None)  # its pattern: the number of paths is unlimited
        seconds = time.monotonic() - visit.arrived
        own_seconds = time.monotonic() - visit.complete  # without its arrival
        self._metrics.count_answer(route or NO_ROUTE, status, own_seconds, visit.stages)
        if status == CLIENT_LEFT:
            self._metrics.count_departure()
        trace = None
        if self._tracing and not _is_untraced_probe(scope):
            trace = self._tracing.record(method, route, _shown(scope["path"]), scope, visit, status, seconds)
        level = logging.DEBUG if status < 400 else logging.INFO if status < 500 or status == 503 else logging.WARNING
        if logger.isEnabledFor(level):  # never the query: it may hold a pose token
            fields = {"method": method, "route": route or NO_ROUTE, "status": status, "milliseconds": round(seconds * 1e3, 2)}
            path = None if route else _shown(scope["path"])
            fields |= {name: value for name, value in (("path", path), ("refusal", visit.refusal), ("trace_id", trace)) if value}
            text = f"%(method)s %({'path' if path else 'route'})s %(status)s %(milliseconds)s ms"
            text += ": %(refusal)s" if visit.refusal else ""
            logger.log(level, text, fields, extra={"request": fields})


def _is_untraced_probe(scope: Scope) -> bool:
    """Whether this is a probe or a scrape that belongs to nobody's trace: there would be little else among the spans."""
    probes = scope["path"] in PROBES or inference_protocol.asks_whether_ready(scope["path"])
    return probes and all(name != b"traceparent" for name, _ in scope["headers"])


def _shown(path: str) -> str:
    """Return a path as logs and spans may show it: up to the first part that is long, as tokens, keys and pictures are."""
    parts = path.split("/", MOST_PARTS)
    shown = list(takewhile(lambda part: len(part) <= LONGEST_PART, parts[:MOST_PARTS]))
    return ascii("/".join(shown if len(shown) == len(parts) else [*shown, "..."]))[1:-1]


def _content_length(headers: list[tuple[bytes, bytes]]) -> int:
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def _expects_continue(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)


def _key(name: bytes, value: bytes) -> bytes | None:
    """Return the key that a header carries, if any. Browsers send Basic, for which they ask their user."""
    if name == b"x-api-key":
        return value
    scheme, _, text = value.partition(b" ")
    if name != b"authorization" or scheme.lower() not in (b"bearer", b"basic"):
        return None
    if scheme.lower() == b"bearer":
        return text.strip()
    try:
        return base64.b64decode(text, validate=True).partition(b":")[2]
    except ValueError:
        return None
