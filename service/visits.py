"""One request on its way through: its ID, when it came, where its time went. Travels in the ASGI scope."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any, Literal

Stage = Literal["decode", "queue", "encode", "reconstruct"]
Stages = dict[Stage, float]  # seconds

SCOPE_KEY = "capserve.visit"
TURN, COMPLETE = "capserve.turn", "capserve.whole"  # scope keys set by the connection: when its turn came, when it was complete
SOUND_ID = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")

request_id: ContextVar[str] = ContextVar("request_id", default="-")  # for the logs


@dataclass(slots=True)
class Visit:
    id: str
    arrived: float = field(default_factory=time.monotonic)
    complete: float = field(default_factory=time.monotonic)  # when its body had arrived too: from then on the time is ours
    stages: Stages = field(default_factory=dict)
    body_bytes: int = 0  # those in memory
    provider: str = ""  # ONNX Runtime's, if one ran a model for it
    refusal: str = ""  # why it was not answered as asked

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = time.monotonic() - started

    def model_ran(self, stages: Stages, provider: str) -> None:
        self.stages |= stages
        self.provider = provider

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that every answer carries, and one more if a model computed it."""
        headers = [(b"x-request-id", self.id.encode()), (b"server-timing", self.server_timing().encode())]
        return [*headers, (b"x-execution-provider", self.provider.encode())] if self.provider else headers

    def server_timing(self) -> str:
        """The stages, and the total since its body arrived, in milliseconds."""
        total = {"total": time.monotonic() - self.complete}
        return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in (self.stages | total).items())


def begin(scope: MutableMapping[str, Any]) -> Visit:
    """Begins the visit of a request whose head has arrived, perhaps a while ago: the event loop may have been busy."""
    visit: Visit = scope.get(SCOPE_KEY) or new_visit(scope["headers"])  # the connection may have refused it before its turn came
    visit.arrived = visit.complete = scope.get(TURN, visit.arrived)
    scope[SCOPE_KEY] = visit
    request_id.set(visit.id)
    return visit


def body_arrived(scope: MutableMapping[str, Any]) -> None:
    """Notes that the request's body has arrived, or never will."""
    visit = of(scope)
    visit.complete = max(visit.arrived, scope.get(COMPLETE) or time.monotonic())


def new_visit(headers: Iterable[tuple[bytes, bytes]]) -> Visit:
    """A visit with the ID that the client gave it, if that can stand in a log, otherwise with a new one."""
    given = next((value for key, value in headers if key == b"x-request-id"), b"")
    # Not os.urandom: an ID is no secret, and each would take 20 microseconds.
    return Visit(given.decode() if SOUND_ID.fullmatch(given) else f"{getrandbits(64):016x}")


@contextmanager
def logged(visit: Visit) -> Iterator[None]:
    """Sets the ID for logs outside a request's own task, where it would otherwise stay set for whoever comes next."""
    before = request_id.set(visit.id)
    try:
        yield
    finally:
        request_id.reset(before)


def of(scope: MutableMapping[str, Any]) -> Visit:
    visit: Visit = scope[SCOPE_KEY]
    return visit
