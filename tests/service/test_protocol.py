"""Requests as bytes on a connection: what a head may be, and what comes of an offer to speak something else."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator

import pytest

from service.web.protocol import MOST_HEAD
from tests.service.processes import DIGIT, PREDICT, Connection, Process, ask, process, request

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with process(patience=1) as running:
        yield running


def said(server: Process, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that the server says on a connection, until it closes it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
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


@pytest.mark.parametrize("pieces", [1, 50])
def test_a_head_has_a_limit(server: Process, pieces: int) -> None:
    def cut(raw: bytes) -> list[bytes]:
        size = -(-len(raw) // pieces)
        return [raw[first : first + size] for first in range(0, len(raw), size)]

    assert statuses(said(server, *cut(head(MOST_HEAD)))) == [200]
    answer = said(server, *cut(head(MOST_HEAD + 1)))
    assert statuses(answer) == [431]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["detail"].startswith("the request's head is larger than 65,536 bytes")


def test_a_body_that_is_announced_too_large_is_refused_before_a_byte_of_it(server: Process) -> None:
    """A client that waits for leave to send (curl does, above a megabyte) never has to."""
    for path in ("/predict", "/predict/batch", "/v2/models/tiny/infer"):
        announced = request(path, b"").replace(b"Content-Length: 0", b"Content-Length: 99999999")
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(announced)
            assert statuses(connection.recv(65_536)) == [413], path  # and no 408, for which it would have waited


def test_who_waits_for_leave_to_send_gets_it(server: Process) -> None:
    """Before the answer, and once."""
    start, _, body = PREDICT.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(start + b"\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
        assert statuses(connection.recv(65_536)) == [100]
        connection.sendall(body)
        assert statuses(b"".join(iter(lambda: connection.recv(65_536), b""))) == [200]


def test_headers_without_end_are_not_kept(server: Process) -> None:
    before = server.resident_megabytes()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(GET[:-2])
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(1_000):
                connection.sendall((b"X-Filler: " + b"a" * 990 + b"\r\n") * 150)
                time.sleep(0.002)
    assert server.resident_megabytes() < before + 20


def test_trailers_have_the_same_limit(server: Process) -> None:
    start = request("/predict", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    answer = said(server, start + b"2\r\nab\r\n0\r\n", b"X-Filler: " + b"a" * 2 * MOST_HEAD)
    assert statuses(answer) == [431]


def test_large_bodies_and_many_requests_at_once_are_no_head(server: Process) -> None:
    large = request("/predict?normalise=none", bytes(5 * MOST_HEAD))
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert statuses(said(server, large + GET * 3_000 + last)) == [415, *[200] * 3_001]


def test_a_slow_head_after_a_good_one_is_told_too(server: Process) -> None:
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


def test_a_connection_that_says_nothing_is_closed(server: Process) -> None:
    assert statuses(said(server)) == [408]
    assert statuses(said(server, *[b"\r\n"] * 8, pause=0.2)) == [408]


def test_what_is_wrong_behind_a_good_request_does_not_take_its_answer(server: Process) -> None:
    assert statuses(said(server, PREDICT + b"nonsense\r\n\r\n")) == [200]
    assert statuses(said(server, GET, b"nonsense\r\n\r\n", pause=0.3)) == [200, 400]


def test_an_offer_of_http_2_is_passed_over_and_the_request_served(server: Process) -> None:
    offered = PREDICT.replace(b"\r\n", b"\r\n" + OFFER, 1)
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


def test_a_body_behind_an_offer_is_never_taken_for_a_request(server: Process) -> None:
    raw = request("/predict", GET).replace(b"\r\n", b"\r\n" + OFFER.replace(b"Upgrade,", b"close, Upgrade,"), 1)
    assert statuses(said(server, raw)) == [415]


def test_chunks_behind_an_offer_are_read(server: Process) -> None:
    start = request("/predict?normalise=none", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunked = start + b"%x\r\n" % len(DIGIT) + DIGIT + b"\r\n0\r\n\r\n"
    assert asyncio.run(ask(server, chunked.replace(b"\r\n", b"\r\n" + OFFER, 1))).status == 200


def test_a_websocket_is_answered_as_the_request_it_is(server: Process) -> None:
    raw = GET.replace(b"\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n", 1)
    assert asyncio.run(ask(server, raw)).body == b'{"live":true}'


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", "one Host header (RFC 9112 3.2), found 0"),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "one Host header (RFC 9112 3.2), found 2"),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "no proxy"),
        (b"\x16\x03\x01\x02\x00", "no TLS on this port"),
    ],
    ids=["no host", "two hosts", "connect", "tls"],
)
def test_a_head_that_is_none_is_refused_with_a_sentence(server: Process, raw: bytes, told: str) -> None:
    answer = said(server, raw)
    assert statuses(answer) == [400]
    assert b"application/problem+json" in answer
    assert told in json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


def test_http_1_0_needs_no_host(server: Process) -> None:
    assert statuses(said(server, b"GET /healthz HTTP/1.0\r\n\r\n")) == [200]


def test_a_refusal_is_counted_once_however_long_the_client_stays() -> None:
    """Also where patience is shorter than the time in which a refused client may read why."""
    with process(patience=0.2) as hasty, socket.create_connection(("127.0.0.1", hasty.port), timeout=10) as connection:
        connection.sendall(head(MOST_HEAD + 1))
        assert statuses(connection.recv(65_536)) == [431]
        time.sleep(0.6)
        assert hasty.metric('capserve_rejections_total{reason="HeadTooLarge"') == 1
        assert hasty.metric('capserve_rejections_total{reason="TooSlow"') == 0


def test_what_is_refused_before_the_app_sees_it_is_counted(server: Process) -> None:
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
