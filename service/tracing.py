"""Requests as OpenTelemetry spans, a child for each stage; continues the caller's trace (W3C traceparent).

Needs the extra `capserve[otel]`, and is switched on with CAPSERVE_TRACES. Spans are made when a request is over, so that one
that is not traced costs nothing; stages follow each other, so they are laid end to end from when the body had arrived.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from importlib.metadata import version

from starlette.types import Scope

from service.errors import StartError
from service.visits import Visit

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    from opentelemetry.util.re import parse_env_headers
except ModuleNotFoundError as error:
    raise StartError("CAPSERVE_TRACES needs OpenTelemetry; `pip install '.[otel]'` in the checkout installs it") from error

HEADER_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")  # where a collector's key goes
NANOSECONDS = 1_000_000_000
SHUTDOWN_TIMEOUT = 2.0  # seconds to send the last spans when the process stops; the collector may be down

for name in ("opentelemetry.trace", "opentelemetry.util"):  # in warnings they quote clients' headers and the collector's
    logging.getLogger(name).setLevel(logging.ERROR)


class Tracing:
    def __init__(self, endpoint: str) -> None:
        """`endpoint` takes OTLP over HTTP, as http://collector:4318/v1/traces does."""
        expect_headers()
        resource = Resource.create({"service.name": "capserve", "service.version": version("capserve")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # close() does it, and waits less long
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("capserve")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, method: str, route: str | None, path: str, scope: Scope, visit: Visit, status: int, seconds: float) -> str:
        """Records a request that is over and took `seconds`; returns its trace's ID."""
        trace_headers = {
            key.decode("latin-1"): value.decode("latin-1")
            for key, value in scope["headers"]
            if key in (b"traceparent", b"tracestate")
        }
        end = time.time_ns()
        begin = end - round(seconds * NANOSECONDS)
        span = self._tracer.start_span(
            f"{method} {route}" if route else method,
            context=self._propagator.extract(trace_headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                **({"http.route": route} if route else {}),
                "url.path": path,
                "url.scheme": scope["scheme"],
                "http.response.status_code": status,
                "capserve.request_id": visit.id,
            },
            start_time=begin,
        )
        parent = set_span_in_context(span)
        begin += round((visit.complete - visit.arrived) * NANOSECONDS)
        for stage, stage_seconds in visit.stages.items():
            child = self._tracer.start_span(stage, context=parent, start_time=begin)
            begin += round(stage_seconds * NANOSECONDS)
            child.end(begin)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)
        return format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Sends what is left, if the collector takes it in time."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(SHUTDOWN_TIMEOUT)


def expect_headers() -> None:
    """Raises StartError for headers that OpenTelemetry would skip as unreadable: without its key a collector takes no spans."""
    for name in HEADER_VARIABLES:
        parts = [part for part in os.environ.get(name, "").split(",") if part.strip()]
        if not all(parse_env_headers(part, liberal=True) for part in parts):
            raise StartError(f"{name}: expected NAME=VALUE, or several separated by commas; what was found is kept secret")
