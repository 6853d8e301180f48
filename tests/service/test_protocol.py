"""Requests as bytes on a connection: what a head may be, and what becomes of an offer to speak another protocol."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service import app
from service.engine import CapsNet
from service.process import server as uvicorns
from service.settings import Settings
from service.visits import request_id
from service.web.protocol import MOST_HEAD, MOST_HEADERS, MOST_QUEUED, Protocol
from tests.service import conftest
from tests.service.processes import DIGIT, PREDICT, Connection, Process, ask, process, request
from tests.service.test_metrics import samples
from tests.service.test_predict import Slow
from tests.waiting import until

T = TypeVar("T")
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE_OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with process(patience=1) as running:
        yield running


def said(server: Process | int, *parts: bytes, pause: float = 0.0) -> bytes:
    """Sends these parts to the server, or to the one on this port; returns all it says until it closes the connection."""
    port = server if isinstance(server, int) else server.port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def statuses(answers: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1.1 (\d{3}) [\w ]+\r\n", answers)]


def head(size: int) -> bytes:
    """A request of that many bytes."""
    start, end = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Filler: ", b"\r\n\r\n"
    return start + b"a" * (size - len(start) - len(end)) + end


def test_many_pipelined_requests_are_answered_in_little_memory(server: Process) -> None:
    """However many are sent at once, all are answered, and so is the last, whose bytes arrive in pieces."""
    many, last = 15_000, PREDICT.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    before = server.resident_megabytes()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        sending = threading.Thread(target=connection.sendall, args=(GET * many + last,))
        sending.start()
        answers = b"".join(iter(lambda: connection.recv(65_536), b""))
        sending.join()
    assert Counter(statuses(answers)) == {200: many + 1}
    assert b'"label":' in answers[-1_000:]
    assert server.resident_megabytes() - before < 16


@pytest.mark.parametrize("pieces", [1, 50])
def test_a_head_larger_than_the_limit_gets_431(server: Process, pieces: int) -> None:
    def cut(raw: bytes) -> list[bytes]:
        size = -(-len(raw) // pieces)
        return [raw[first : first + size] for first in range(0, len(raw), size)]

    assert statuses(said(server, *cut(head(MOST_HEAD)))) == [200]
    answer = said(server, *cut(head(MOST_HEAD + 1)))
    assert statuses(answer) == [431]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["detail"].startswith("the request's head is larger than 65,536 bytes")


def test_the_last_of_many_pipelined_requests_keeps_its_body(server: Process) -> None:
    """The last closes the connection, and its body is what has not been read when its turn comes."""
    last = request("/predict?normalise=none", bytes(5 * MOST_HEAD)).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    for before in (17, 40, 90):
        assert statuses(said(server, GET * before + last)) == [*[200] * before, 415]


def test_a_head_with_too_many_headers_gets_431(server: Process) -> None:
    start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert statuses(said(server, start + b"a:\r\n" * (MOST_HEADERS - 2) + b"\r\n")) == [200]
    answer = said(server, start + b"a:\r\n" * 16_000)
    assert statuses(answer) == [431]
    assert "more than 256 headers" in json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


def test_a_body_announced_as_too_large_gets_413_before_it_is_sent(server: Process) -> None:
    """A client that waits for 100 Continue (curl does, above a megabyte) never has to send it."""
    for path in ("/predict", "/predict/batch", "/v2/models/tiny/infer"):
        announced = request(path, b"").replace(b"Content-Length: 0", b"Content-Length: 99999999")
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(announced)
            assert statuses(connection.recv(65_536)) == [413], path  # no 408, which comes only after a wait


@pytest.mark.parametrize(("path", "megabytes", "status"), [("/predict", 30, 413), ("/predict?model=nope", 9, 404)])
def test_a_client_that_sends_all_before_reading_still_gets_the_error(
    server: Process, path: str, megabytes: int, status: int
) -> None:
    """As Python's urllib does, which asks that the connection be closed after each answer."""
    sent = request(path, bytes(megabytes << 20)).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    answer = said(server, sent)
    assert statuses(answer) == [status]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["status"] == status


def test_a_connection_with_an_endless_unread_body_is_closed(server: Process) -> None:
    endless = GET.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    began = time.perf_counter()
    assert statuses(said(server, endless, b"1\r\na\r\n")) == [200]
    assert 0.5 < time.perf_counter() - began < 8
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert statuses(said(server, endless, b"0\r\n\r\n", b"", b"", last, pause=0.4)) == [200, 200]


def test_white_space_around_a_header_value_is_stripped(server: Process) -> None:
    named = GET.replace(b"\r\n\r\n", b"\r\nX-Request-ID:\tmine \t \r\nConnection: close \r\n\r\n")
    assert re.search(rb"\r\nx-request-id: mine\r\n", said(server, named), re.IGNORECASE)


@pytest.mark.parametrize(("rest", "status"), [("", 200), ("/healthz", 200), ("?label=7", 200), ("/reconstruct?label=7#x", 200)])
def test_an_absolute_url_is_accepted_with_or_without_a_path(server: Process, rest: str, status: int) -> None:
    told = said(server, f"GET HTTP://localhost{rest} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert statuses(told) == [status]


def test_a_client_that_expects_100_continue_gets_it_once(server: Process) -> None:
    """100 Continue comes before the answer, and once."""
    start, _, body = PREDICT.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(start + b"\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
        assert statuses(connection.recv(65_536)) == [100]
        connection.sendall(body)
        assert statuses(b"".join(iter(lambda: connection.recv(65_536), b""))) == [200]


def test_a_refusal_instead_of_100_continue_closes_the_connection(server: Process) -> None:
    """Nobody knows whether the body still comes: the next bytes may be that body, or another request."""
    start = PREDICT.replace(b"/predict?", b"/predict?model=none&").partition(b"\r\n\r\n")[0]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(start + b"\r\nExpect: 100-continue\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
        assert statuses(answer) == [404]
        assert b"\r\nconnection: close\r\n" in answer


def test_a_body_in_tiny_pieces_is_read(server: Process) -> None:
    """As a streaming writer of JSON sends it, number by number."""
    start = request("/v2/models/tiny/infer", b"", "application/json").replace(
        b"Content-Length: 0", b"Connection: close\r\nTransfer-Encoding: chunked"
    )
    tensor = {"name": "images", "shape": [8, 1, 28, 28], "datatype": "FP32", "data": [0.5] * 8 * 784}
    pieces = [piece.encode() for piece in json.JSONEncoder().iterencode({"inputs": [tensor]})]
    assert len(pieces) > 6_000
    told = said(server, start, *[b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"])
    assert statuses(told) == [200]


def test_a_malformed_rest_of_a_body_gets_no_second_answer(server: Process) -> None:
    start = request("/predict?model=none", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert statuses(said(server, start, b"no length\r\n", pause=0.2)) == [404]


def test_a_content_length_may_have_leading_zeros(server: Process) -> None:
    """However many: Python converts no text of thousands of digits to a number."""
    start = PREDICT.replace(b"Content-Length: ", b"Connection: close\r\nContent-Length: " + b"0" * 5_000, 1)
    assert statuses(said(server, start)) == [200]


def test_an_http_1_0_client_gets_no_100_continue(server: Process) -> None:
    asked = PREDICT.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nExpect: 100-continue\r\n", 1)
    assert statuses(said(server, asked)) == [200]


def test_endless_headers_are_not_kept_in_memory(server: Process) -> None:
    before = server.resident_megabytes()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(GET[:-2])
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(1_000):
                connection.sendall((b"X-Filler: " + b"a" * 990 + b"\r\n") * 150)
                time.sleep(0.002)
    assert server.resident_megabytes() < before + 20


def test_a_transfer_coding_other_than_chunked_alone_gets_400(server: Process) -> None:
    """A proxy in front of us may read such a body differently."""
    for coding in (b"gzip, chunked", b"chunked, gzip", b"gzip"):
        head = request("/predict", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: " + coding)
        answer = said(server, head + b"0\r\n\r\n")
        assert statuses(answer) == [400], coding


def test_trailers_have_the_same_limit_as_the_head(server: Process) -> None:
    start = request("/predict", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    answer = said(server, start + b"2\r\nab\r\n0\r\n", b"X-Filler: " + b"a" * 2 * MOST_HEAD)
    assert statuses(answer) == [431]


def test_trailers_are_not_taken_for_headers(server: Process) -> None:
    """They come after the head has been acted on, and could hold a key, say, or a length."""
    start = GET.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    answer = said(server, start + b"0\r\nX-Request-ID: behind\r\n\r\n")
    assert statuses(answer) == [200]
    assert b"behind" not in answer


def test_large_bodies_and_many_requests_do_not_count_as_a_head(server: Process) -> None:
    large = request("/predict?normalise=none", bytes(5 * MOST_HEAD))
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert statuses(said(server, large + GET * 3_000 + last)) == [415, *[200] * 3_001]


def test_a_slow_head_after_a_good_request_gets_408(server: Process) -> None:
    async def dawdle() -> None:
        connection = await Connection.to(server)
        assert (await connection.ask(GET)).status == 200
        await asyncio.sleep(1.5)  # idle, which is no fault
        assert (await connection.ask(GET)).status == 200
        answer = await connection.ask(b"GET /healthz HT")
        assert answer.status == 408
        assert 0.9 < answer.seconds < 4
        await connection.close()

    asyncio.run(asyncio.wait_for(dawdle(), 20))


def test_a_head_whose_rest_is_queued_behind_requests_does_not_time_out() -> None:
    last = head(100)
    with process(1.0, patience=0.4) as slow:
        answers = said(slow, PREDICT + GET * MOST_QUEUED + last[:50], last[50:], pause=0.2)
    assert statuses(answers) == [200] * (MOST_QUEUED + 2)


def test_a_silent_connection_gets_408(server: Process) -> None:
    assert statuses(said(server)) == [408]
    assert statuses(said(server, *[b"\r\n"] * 8, pause=0.2)) == [408]


def test_a_good_request_is_answered_despite_nonsense_after_it(server: Process) -> None:
    assert statuses(said(server, PREDICT + b"nonsense\r\n\r\n")) == [200]
    assert statuses(said(server, GET, b"nonsense\r\n\r\n", pause=0.3)) == [200, 400]


def test_a_fault_in_a_pipelined_body_is_reported_when_its_turn_comes(server: Process) -> None:
    """It is told once, and at once: nobody waits for the rest of the body."""
    before = server.metric('capserve_rejections_total{reason="TooSlow"}')
    began = time.monotonic()
    chunked = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: mine\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    answers = said(server, GET + GET + chunked)
    assert time.monotonic() - began < 0.9
    assert statuses(answers) == [200, 200, 400]
    last = answers.rpartition(b"HTTP/1.1 400 ")[2].lower()
    assert b"x-request-id: mine\r\n" in last
    assert b"connection: close\r\n" in last
    assert server.metric('capserve_rejections_total{reason="TooSlow"}') == before


def test_an_http_2_upgrade_is_ignored_and_the_request_served(server: Process) -> None:
    offered = PREDICT.replace(b"\r\n", b"\r\n" + UPGRADE_OFFER, 1)
    begin = offered.index(b"\r\n\r\n") + 4

    async def each_way() -> None:
        expected = await ask(server, PREDICT)
        assert expected.status == 200
        connection = await Connection.to(server)
        for raw in (offered, offered, PREDICT):
            answer = await connection.ask(raw)
            assert (answer.status, answer.body) == (200, expected.body)
        for cut in (begin - 30, begin, begin + 5):
            connection.writer.write(offered[:cut])
            await asyncio.sleep(0.1)
            assert (await connection.ask(offered[cut:])).body == expected.body
        await connection.close()

    asyncio.run(asyncio.wait_for(each_way(), 20))


def test_a_body_after_an_upgrade_offer_is_not_taken_for_a_request(server: Process) -> None:
    raw = request("/predict", GET).replace(b"\r\n", b"\r\n" + UPGRADE_OFFER.replace(b"Upgrade,", b"close, Upgrade,"), 1)
    assert statuses(said(server, raw)) == [415]


def test_a_chunked_body_after_an_upgrade_offer_is_read(server: Process) -> None:
    start = request("/predict?normalise=none", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunked = start + b"%x\r\n" % len(DIGIT) + DIGIT + b"\r\n0\r\n\r\n"
    assert asyncio.run(ask(server, chunked.replace(b"\r\n", b"\r\n" + UPGRADE_OFFER, 1))).status == 200


def test_a_websocket_upgrade_is_answered_as_a_plain_request(server: Process) -> None:
    raw = GET.replace(b"\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n", 1)
    assert asyncio.run(ask(server, raw)).body == b'{"live":true}'


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", "one Host header (RFC 9112 3.2), found 0"),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "one Host header (RFC 9112 3.2), found 2"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "expected HTTP/1.1, found HTTP/2"),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "no proxy"),
        (b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", "an HTTP method, such as GET or POST, in capitals"),
        (b"post / HTTP/1.1\r\nHost: a\r\n\r\n", "an HTTP method, such as GET or POST, in capitals"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", "found: Invalid character in Content-Length"),
        (b"\x16\x03\x01\x02\x00", "no TLS on this port"),
        (b"\x16", "no TLS on this port"),
        (
            b"POST /predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\x16\x03\r\n",
            "found: Invalid character in chunk size",
        ),
        ("GET /reconstruct?label=é HTTP/1.1\r\nHost: a\r\n\r\n".encode(), "write é, for example, as %C3%A9"),
        (b"GET http://[/healthz HTTP/1.1\r\nHost: a\r\n\r\n", "expected an address that begins with /"),
        (b"GET /reconstruct?label=a b HTTP/1.1\r\nHost: x\r\n\r\n", "write a space in an address as %20"),
    ],
    ids=[
        "no host",
        "two hosts",
        "http 2",
        "connect",
        "unknown method",
        "lower-case method",
        "length",
        "tls",
        "tls, first byte only",
        "chunk",
        "not ascii",
        "unclosed host",
        "a space",
    ],
)
def test_a_malformed_head_gets_400_with_an_explanation(server: Process, raw: bytes, told: str) -> None:
    answer = said(server, raw)
    assert statuses(answer) == [400]
    assert b"application/problem+json" in answer
    assert told in json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


PICTURES = 500  # their answer, in JSON, is larger than what the kernel buffers for a client that does not read


def inference() -> bytes:
    values = bytes(PICTURES * 784 * 4)
    tensor = {"name": "images", "shape": [PICTURES, 1, 28, 28], "datatype": "FP32"}
    told = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(values)}}]}).encode()
    raw = request("/v2/models/tiny/infer", told + values, "application/octet-stream")
    return raw.replace(b"\r\n", b"\r\nInference-Header-Content-Length: %d\r\n" % len(told), 1)


def announced(answer: bytes) -> int:
    found = re.search(rb"content-length: (\d+)", answer)
    assert found is not None
    return int(found[1])


def narrow(port: int | None) -> socket.socket:
    """A connection that buffers little of what its client has not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", port))
    return connection


def test_a_client_that_does_not_read_is_cut_off(server: Process) -> None:
    def counted() -> float:
        return server.metric('capserve_rejections_total{reason="TooSlow"')

    before = counted()
    with narrow(server.port) as connection:
        connection.sendall(inference())
        until(lambda: counted() == before + 1)
        answer = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert statuses(answer) == [200]
    assert len(answer) < announced(answer)


def test_a_client_that_does_not_read_keeps_no_body_in_memory(nets: dict[str, CapsNet]) -> None:
    with conftest.serving(conftest.settings(), nets) as client, narrow(client.base_url.port) as connection:
        connection.sendall(inference() + PREDICT)  # the second answer waits until the first is read
        until(lambda: samples(client)["capserve_batch_images_sum", "encoder", "tiny"] == PICTURES + 1)
        until(lambda: samples(client)["capserve_body_bytes",] == 0, seconds=3)
        assert samples(client)["capserve_unread_bytes",] > 1_000_000


def test_unread_answers_beyond_their_bound_make_requests_get_503(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "LARGEST_BODIES", 1)  # so that one answer is more than may be in memory
    with conftest.serving(conftest.settings(max_body=2_000_000), nets) as client, narrow(client.base_url.port) as unread:
        unread.sendall(inference())
        until(lambda: samples(client)["capserve_unread_bytes",] > 2_000_000)
        for refused in (client.get("/reconstruct"), client.post("/predict", content=DIGIT)):
            assert (refused.status_code, "unread answers" in refused.json()["detail"]) == (503, True)
        assert client.get("/healthz").status_code == 200
        unread.close()
        until(lambda: samples(client)["capserve_unread_bytes",] == 0)
        assert client.get("/reconstruct").status_code == 200


def test_a_body_without_room_in_memory_gets_503_at_once(nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LARGEST_BODIES", 1)
    announced = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 100000\r\n\r\n"
    with conftest.serving(conftest.settings(max_body=100_000), nets) as client:
        port = client.base_url.port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(announced + bytes(50_000))
            until(lambda: samples(client)["capserve_body_bytes",] == 50_000)
            with socket.create_connection(("127.0.0.1", port), timeout=10) as other:
                other.sendall(announced)
                answer = other.recv(65_536)
        assert statuses(answer) == [503]
        assert b"others' bodies" in answer


def test_a_client_leaving_with_requests_under_way_logs_no_error(net: CapsNet, caplog: pytest.LogCaptureFixture) -> None:
    slow = {"tiny": replace(net, encoder=Slow(net.encoder, 0.3))}
    with conftest.serving(conftest.settings(), slow) as client:
        connection = socket.create_connection((client.base_url.host, client.base_url.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
        connection.sendall(PREDICT * 3)
        time.sleep(0.1)
        connection.close()
        until(lambda: samples(client).get(("capserve_batch_images_sum", "encoder", "tiny"), 0) > 0)
        time.sleep(0.1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_slow_reader_gets_the_whole_answer(server: Process) -> None:
    last = inference().replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    got = bytearray()
    with narrow(server.port) as connection:
        connection.sendall(last)
        while data := connection.recv(1 << 17):
            got += data
            time.sleep(len(data) / 3.5e6)  # takes seconds in all, and the patience is one
    assert len(got.partition(b"\r\n\r\n")[2]) == announced(bytes(got))


def test_an_idle_connection_is_not_closed_under_the_next_request(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of the next request had begun when the answer before it was sent."""

    def hasty(app: FastAPI, settings: Settings) -> uvicorn.Config:
        config = uvicorns.uvicorn_config(app, settings)
        config.timeout_keep_alive = 0.5  # type: ignore[assignment]
        return config

    monkeypatch.setattr(conftest, "uvicorn_config", hasty)
    with conftest.serving(conftest.settings(), nets) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=10) as connection:
            connection.sendall(PREDICT + PREDICT[:20])
            assert statuses(connection.recv(65_536)) == [200]
            connection.sendall(PREDICT[20:-1])
            time.sleep(0.8)
            connection.sendall(PREDICT[-1:])
            assert statuses(connection.recv(65_536)) == [200]


def test_http_1_0_needs_no_host(server: Process) -> None:
    assert statuses(said(server, b"GET /healthz HTTP/1.0\r\n\r\n")) == [200]


def test_a_refusal_is_counted_once_however_long_the_client_stays() -> None:
    """Also where patience is shorter than the time that a refused client has to read why."""
    with process(patience=0.2) as hasty, socket.create_connection(("127.0.0.1", hasty.port), timeout=10) as connection:
        connection.sendall(head(MOST_HEAD + 1))
        assert statuses(connection.recv(65_536)) == [431]
        time.sleep(0.6)
        assert hasty.metric('capserve_rejections_total{reason="HeadTooLarge"') == 1
        assert hasty.metric('capserve_rejections_total{reason="TooSlow"') == 0


def test_requests_refused_before_the_app_are_counted(server: Process) -> None:
    def counted() -> dict[str, float]:
        metrics = asyncio.run(ask(server, GET.replace(b"/healthz", b"/metrics"))).body.decode()
        found = re.findall(r'^capserve_rejections_total{reason="(\w+)"} (\S+)$', metrics, re.MULTILINE)
        return {why: float(count) for why, count in found}

    before = counted()
    said(server, head(MOST_HEAD + 1))
    said(server, b"nonsense\r\n\r\n")
    said(server, GET[:10])
    after = counted()
    grown = {why: after[why] - before.get(why, 0) for why in after if after[why] != before.get(why)}
    assert grown == {"HeadTooLarge": 1, "MalformedRequest": 1, "TooSlow": 1}


@pytest.mark.parametrize(("wrong", "status"), [(b"no length\r\n", 400), (b"0\r\nX: " + b"a" * 2 * MOST_HEAD, 431)])
def test_a_request_refused_for_its_body_counts_with_its_status(server: Process, wrong: bytes, status: int) -> None:
    def counted(status: int) -> float:
        return server.metric(f'capserve_requests_total{{route="/predict",status="{status}"')

    start = request("/predict", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked\r\nX-Request-ID: mine")
    before, left = counted(status), counted(499)
    answer = said(server, start, wrong, pause=0.1)
    assert statuses(answer) == [status]
    assert b"\r\nx-request-id: mine\r\n" in answer
    assert (counted(status), counted(499)) == (before + 1, left)


@pytest.mark.parametrize("asked", [1, 3])
def test_a_client_that_leaves_counts_once_as_499(net: CapsNet, asked: int) -> None:
    with conftest.serving(conftest.settings(), {"tiny": replace(net, decoder=Slow(net.decoder, 1.0))}) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=10) as connection:
            connection.sendall(b"GET /reconstruct?label=7 HTTP/1.1\r\nHost: localhost\r\n\r\n" * asked)
            time.sleep(0.2)  # of the second that the first drawing takes
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: samples(client).get(("capserve_requests_total", "/reconstruct", "499")) == 1)
        assert ("capserve_requests_total", "/reconstruct", "200") not in samples(client)


def test_a_head_request_refused_for_its_body_counts_with_its_status(net: CapsNet) -> None:
    start = b"HEAD /reconstruct?label=7 HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        conftest.serving(conftest.settings(), {"tiny": replace(net, decoder=Slow(net.decoder, 1.0))}) as client,
        socket.create_connection((client.base_url.host, client.base_url.port), timeout=10) as connection,
    ):
        connection.sendall(start)
        time.sleep(0.1)  # of the second that the drawing takes
        connection.sendall(b"no length\r\n")
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
        assert statuses(answer) == [400]
        assert answer.endswith(b"\r\n\r\n")  # no body
        until(lambda: samples(client).get(("capserve_requests_total", "/reconstruct", "400")) == 1)
        assert ("capserve_requests_total", "/reconstruct", "499") not in samples(client)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nX-Request-ID: mine\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nX-Request-ID: mine\r\nX-Filler: " + b"a" * MOST_HEAD, 431),
        (b"GET /healthz HTTP/1.1\r\nX-Request-ID: mine\r\nX-", 408),
    ],
)
def test_answers_refused_before_the_app_have_a_request_id_and_timing(server: Process, raw: bytes, status: int) -> None:
    answer = said(server, raw)
    assert statuses(answer) == [status]
    assert answer.count(b"\r\nx-request-id: mine\r\n") == 1
    assert b"\r\nserver-timing: total;dur=" in answer


def test_a_refusal_does_not_reuse_the_previous_request_id(server: Process) -> None:
    first = GET.replace(b"\r\n\r\n", b"\r\nX-Request-ID: first\r\n\r\n")
    for after, status in ((b"nonsense\r\n\r\n", 400), (b"\r\n" * MOST_HEAD, 431)):
        answers = said(server, first, after, pause=0.1)
        names = re.findall(rb"\r\nx-request-id: (\S+)\r\n", answers)
        assert statuses(answers) == [200, status]
        assert names[0] == b"first" != names[1]


class Heard(logging.Handler):
    """Collects each record's first words, with the request id that the log's formatter would give it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((request_id.get(), " ".join(record.getMessage().split()[:3])))


def test_logs_have_the_request_ids_of_the_answers(net: CapsNet, caplog: pytest.LogCaptureFixture) -> None:
    """Also where a body is wrong before the app had its turn, and after another client's head was refused."""
    caplog.set_level(logging.INFO, "service")
    heard = Heard()
    logging.getLogger("service").addHandler(heard)
    start = request("/predict", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    names = []
    try:
        with conftest.serving(conftest.settings(), {"tiny": net}) as client:
            for parts in (
                [GET.partition(b"Host")[0] + b"X-Request-ID: alice\r\n\r\n"],
                [start, b"no length\r\n"],
                [start + b"no length\r\n"],
            ):
                answer = said(client.base_url.port, *parts, pause=0.1)
                assert statuses(answer) == [400]
                names += re.findall(r"\r\nx-request-id: (\S+)\r\n", answer.decode())
    finally:
        logging.getLogger("service").removeHandler(heard)
    refused, told = "refused with 400:", "POST /predict 400"
    assert [line for line in heard.lines if line[1] in (refused, told)] == [
        ("alice", refused),
        (names[1], refused),
        (names[1], told),
        (names[2], refused),
        (names[2], told),
    ]


def _objects(kind: type[T]) -> set[T]:
    return {each for each in gc.get_objects() if isinstance(each, kind)}


def _send_and_end(port: int, sent: bytes, reset: bool) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent)
        assert connection.recv(65_536)
        if reset:  # as a client does that has not read everything, and many probes
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture(scope="module")
def quiet_port(nets: dict[str, CapsNet]) -> Iterator[int]:
    """The port of a server that gets no other requests."""
    with conftest.serving(conftest.settings(), nets) as client:
        client.close()
        assert client.base_url.port is not None
        yield client.base_url.port


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(GET, id="answered"),
        pytest.param(request("/predict?model=none", bytes(250_000)), id="refused before its body"),
        pytest.param(GET * 3, id="several at once"),
        pytest.param(b"NONSENSE\r\n\r\n", id="no request"),
        pytest.param(GET.replace(b"\r\n\r\n", b"\r\n" + UPGRADE_OFFER + b"\r\n"), id="an upgrade offer"),
    ],
)
def test_an_ended_connection_is_freed_without_the_garbage_collector(quiet_port: int, sent: bytes, reset: bool) -> None:
    """The collector would run only after some thousand of them, each with up to 190 KB of heads and unread bodies."""
    others = _objects(Protocol)  # of servers that other tests use
    gc.disable()
    try:
        for _ in range(3):
            _send_and_end(quiet_port, sent, reset)
        until(lambda: not _objects(Protocol) - others, seconds=5)
    finally:
        gc.enable()


def test_an_unread_body_is_freed_while_the_client_stays_connected(quiet_port: int) -> None:
    with socket.create_connection(("127.0.0.1", quiet_port), timeout=10) as connection:
        others = _objects(RequestResponseCycle)
        connection.sendall(request("/predict?model=none", bytes(60_000)))
        assert connection.recv(65_536)
        (mine,) = _objects(RequestResponseCycle) - others
        until(lambda: not mine.body, seconds=5)
