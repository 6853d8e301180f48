"""One request on its way through: its name, when it came, where its time went. Travels in the ASGI scope."""

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
TURN, WHOLE = "capserve.turn", "capserve.whole"  # in the scope, where the connection tells: when its turn came, when it was here
SOUND_ID = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")

request_id: ContextVar[str] = ContextVar("request_id", default="-")  # for the logs


@dataclass(slots=True)
class Visit:
    id: str
    arrived: float = field(default_factory=time.monotonic)
    complete: float = field(default_factory=time.monotonic)  # when its body was here too: from then on it is we who take time
    stages: Stages = field(default_factory=dict)
    holds: int = 0  # bytes of its body
    provider: str = ""  # of ONNX Runtime, that ran a model for it
    refusal: str = ""  # why it was not answered as asked

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = time.monotonic() - started

    def ran(self, stages: Stages, provider: str) -> None:
        self.stages |= stages
        self.provider = provider

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What every answer carries, and an answer of a model's more."""
        found = [(b"x-request-id", self.id.encode()), (b"server-timing", self.server_timing().encode())]
        return [*found, (b"x-execution-provider", self.provider.encode())] if self.provider else found

    def server_timing(self) -> str:
        """The stages, and all since its body was here, in milliseconds."""
        total = {"total": time.monotonic() - self.complete}
        return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in (self.stages | total).items())


def begin(scope: MutableMapping[str, Any]) -> Visit:
    """The visit of a request whose head is here; the event loop may have taken its time since."""
    visit: Visit = scope.get(SCOPE_KEY) or named(scope["headers"])  # the connection may have refused it before its turn came
    visit.arrived = visit.complete = scope.get(TURN, visit.arrived)
    scope[SCOPE_KEY] = visit
    request_id.set(visit.id)
    return visit


def completed(scope: MutableMapping[str, Any]) -> None:
    """Its body is here, if it will ever be."""
    visit = of(scope)
    visit.complete = max(visit.arrived, scope.get(WHOLE) or time.monotonic())


def named(headers: Iterable[tuple[bytes, bytes]]) -> Visit:
    """Under the name the client gave it, if that is one that can stand in a log, else a new one."""
    given = next((value for key, value in headers if key == b"x-request-id"), b"")
    # Not os.urandom: a name is no secret, and each would take 20 microseconds.
    return Visit(given.decode() if SOUND_ID.fullmatch(given) else f"{getrandbits(64):016x}")


@contextmanager
def logged(visit: Visit) -> Iterator[None]:
    """Outside a request's own task, where what is set would stay set for whoever comes next."""
    before = request_id.set(visit.id)
    try:
        yield
    finally:
        request_id.reset(before)


def of(scope: MutableMapping[str, Any]) -> Visit:
    visit: Visit = scope[SCOPE_KEY]
    return visit
