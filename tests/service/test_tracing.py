"""Spans as a collector receives them: over HTTP, from a real server."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.engine import CapsNet
from service.visits import Visit
from tests.service.conftest import BUNDLES, serving, settings
from tests.service.launching import appears, run, started
from tests.service.processes import process

collector = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra otel is not installed"
)

MICROSECOND = 1_000  # nanoseconds: times are rounded
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def received() -> Iterator[tuple[str, list[bytes]]]:
    """A collector's address, and what it was sent."""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def spans_of(bodies: list[bytes]) -> list[Any]:
    requests = [collector.ExportTraceServiceRequest.FromString(body) for body in bodies]
    return [span for each in requests for part in each.resource_spans for scope in part.scope_spans for span in scope.spans]


def test_a_request_is_a_span_of_the_callers_trace_with_its_stages_inside(
    nets: dict[str, CapsNet], seven: bytes, received: tuple[str, list[bytes]]
) -> None:
    def slowly() -> Iterator[bytes]:
        yield seven[:10]
        time.sleep(0.5)
        yield seven[10:]

    endpoint, bodies = received
    with serving(settings(traces=endpoint), nets) as client:
        client.post("/predict", content=slowly(), headers={"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "caller=1"})
    spans = spans_of(bodies)
    (whole,) = [span for span in spans if span.name == "POST /predict"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, CALLER)
    assert whole.trace_state == "caller=1"
    told = {each.key: each.value.string_value for each in whole.attributes}
    assert (told["http.request.method"], told["http.route"]) == ("POST", "/predict")
    stages = {span.name: span for span in spans if span.parent_span_id == whole.span_id}
    assert list(stages) == ["decode", "queue", "encode", "reconstruct"]
    for span in stages.values():
        assert span.trace_id == whole.trace_id
        assert whole.start_time_unix_nano + 0.4e9 < span.start_time_unix_nano  # when its body was here
        assert span.start_time_unix_nano < span.end_time_unix_nano <= whole.end_time_unix_nano
    for earlier, later in itertools.pairwise(stages.values()):
        assert later.start_time_unix_nano >= earlier.end_time_unix_nano - MICROSECOND


def test_a_client_error_does_not_mark_its_span_as_an_error(nets: dict[str, CapsNet], received: tuple[str, list[bytes]]) -> None:
    endpoint, bodies = received
    with serving(settings(traces=endpoint), nets) as client:
        assert client.get("/reconstruct?dim=99&delta=1").status_code == 422
    (span,) = [span for span in spans_of(bodies) if span.name == "GET /reconstruct"]
    assert span.status.code == 0


def test_a_span_names_an_unrouted_path_and_probes_have_no_span(
    nets: dict[str, CapsNet], received: tuple[str, list[bytes]]
) -> None:
    """Unless a probe comes with a trace of its own."""
    endpoint, bodies = received
    with serving(settings(traces=endpoint), nets) as client:
        client.get("/nowhere?x=1")
        client.get("/metrics")
        client.get("/v2/health/live")
        client.get("/v2/models/tiny/ready")
        client.get("/healthz", headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})
    lost, probe = spans_of(bodies)
    told = {each.key: each.value.string_value for each in lost.attributes}
    assert (lost.name, told["url.path"], told["url.scheme"]) == ("GET", "/nowhere", "http")
    assert "http.route" not in told
    assert (probe.name, probe.trace_id.hex()) == ("GET /healthz", TRACE)


def test_a_503_marks_its_span_as_an_error(received: tuple[str, list[bytes]]) -> None:
    from service.tracing import Tracing  # needs the extra

    endpoint, bodies = received
    tracing = Tracing(endpoint)
    tracing.record("POST", "/predict", "/predict", {"headers": [], "scheme": "http"}, Visit("1"), 503, 0.1)
    tracing.close()
    (span,) = spans_of(bodies)
    assert span.status.code == 2


def test_fastapi_makes_no_spans_of_its_own(nets: dict[str, CapsNet], token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a global provider is set up, FastAPI would make some, and they would hold the whole URL."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with serving(settings(), nets) as client:
        assert client.get("/reconstruct", params={"pose": token}).status_code == 200
    assert not [span.name for span in exporter.get_finished_spans()]


def test_a_log_line_has_the_trace_id_and_quotes_no_header(tmp_path: Path, received: tuple[str, list[bytes]]) -> None:
    """OpenTelemetry would quote headers that it does not understand in a warning."""
    endpoint, _ = received
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "x=\x85sesame"}
    log = tmp_path / "log"
    with started(log, CAPSERVE_TRACES=endpoint, CAPSERVE_LOG_FORMAT="json") as (_, url):
        answer = httpx.get(f"{url}/nowhere", headers={key: value.encode("latin-1") for key, value in headers.items()})
        assert answer.status_code == 404
        appears(log, '"status": 404')
    (told,) = [line for line in map(json.loads, log.read_text().splitlines()) if line.get("status") == 404]
    assert told["trace_id"] == TRACE
    assert "sesame" not in log.read_text()


@pytest.mark.parametrize(
    ("verb", "name", "typed"),
    [
        ("serve", "OTEL_EXPORTER_OTLP_HEADERS", "api-key: sesame"),
        ("serve", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "api-key=x,sesame"),
        ("check", "OTEL_EXPORTER_OTLP_HEADERS", "api key=sesame"),
    ],
)
def test_an_unreadable_collector_key_is_reported_without_being_shown(verb: str, name: str, typed: str) -> None:
    ended = run(verb, CAPSERVE_TRACES="http://127.0.0.1:4318/v1/traces", **{name: typed})
    assert ended.returncode == 2
    assert f"{name}: expected NAME=VALUE, or several separated by commas" in ended.stderr
    assert "sesame" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("listens", [True, False], ids=["silent", "not listening"])
def test_a_collector_that_does_not_answer_does_not_delay_exit(listens: bool, seven: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}/v1/traces"
        if not listens:
            collector.close()
        with process(traces=endpoint) as server:
            assert httpx.post(f"{server.url}/predict", files={"file": seven}).status_code == 200
            began = time.monotonic()
            server.terminate()
            assert server.popen.wait(20) == 0
            assert time.monotonic() - began < 5


def test_tracing_without_the_extra_says_what_to_install() -> None:
    blocked = "import sys; sys.modules['opentelemetry.exporter'] = None"  # FastAPI brings the API alone
    code = f"{blocked}; from service.__main__ import main; sys.exit(main(['serve', '--port', '0']))"
    environment = {**os.environ, "CAPSERVE_MODELS": str(BUNDLES), "CAPSERVE_TRACES": "http://127.0.0.1:4318/v1/traces"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 2
    assert "'.[otel]'" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
