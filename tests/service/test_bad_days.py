"""Clients that disconnect, send slowly or send garbage: nobody else notices."""

import asyncio
import json
import time

import pytest
from PIL import Image

from tests.service.conftest import encoded
from tests.service.processes import DIGIT, PREDICT, Answer, Connection, Process, ask, process, request
from tests.waiting import until_soon

pytestmark = pytest.mark.alone

CROWD = 60


@pytest.fixture(scope="module")
def slow_server():
    """A server with little patience, whose model takes 100 ms for each picture."""
    with process(0.1, max_batch=1, patience=1, deadline=2) as server:
        yield server


def test_pictures_of_disconnected_clients_are_not_computed(slow_server: Process):
    async def vanish() -> None:
        before = slow_server.metric("capserve_batch_images_sum")
        connections = await asyncio.gather(*(Connection.to(slow_server) for _ in range(CROWD)))
        for connection in connections:
            connection.writer.write(PREDICT)
            await connection.writer.drain()
        await asyncio.sleep(0.3)
        for connection in connections:
            connection.writer.transport.abort()
        await until_soon(lambda: slow_server.metric('capserve_rejections_total{reason="gone"') > CROWD / 2)
        answer = await ask(slow_server, PREDICT)
        assert answer.status == 200
        assert answer.seconds < 2  # the crowd's work would have taken six
        assert slow_server.metric("capserve_batch_images_sum") - before < CROWD / 2

    asyncio.run(asyncio.wait_for(vanish(), 30))


def test_requests_past_the_deadline_get_504(slow_server: Process):
    async def crowd() -> list:
        return await asyncio.gather(*(ask(slow_server, PREDICT) for _ in range(CROWD)))

    answers = asyncio.run(asyncio.wait_for(crowd(), 30))
    assert {answer.status for answer in answers} == {200, 504}
    assert max(answer.seconds for answer in answers) < 4
    late = next(answer for answer in answers if answer.status == 504)
    assert late.headers["content-type"] == "application/problem+json"


def test_a_request_of_many_batches_is_counted_as_rejected_once():
    boundary = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
    pictures = b"".join(boundary + DIGIT + b"\r\n" for _ in range(12)) + b"--x--\r\n"
    many = request("/predict/batch?normalise=none", pictures, "multipart/form-data; boundary=x")

    async def leave(server: Process) -> None:
        connection = await Connection.to(server)
        connection.writer.write(many)
        await asyncio.sleep(0.15)
        connection.writer.transport.abort()
        await until_soon(lambda: server.metric('capserve_rejections_total{reason="gone"'))

    with process(0.1, max_batch=1, deadline=0.5) as server:
        assert asyncio.run(ask(server, many)).status == 504
        assert server.metric("capserve_rejections_total") == 1
        asyncio.run(asyncio.wait_for(leave(server), 20))
        assert asyncio.run(ask(server, PREDICT)).status == 200  # so nothing of the abandoned request is left
        assert server.metric("capserve_rejections_total") == 2


# Its decoding cannot be interrupted, so the server's own limits must end the request.
LARGE = request("/predict", encoded(Image.effect_noise((300, 300), 80)))


def test_slow_decoding_gets_504_promptly_and_disconnects_are_counted():
    async def leave(server: Process) -> None:
        connection = await Connection.to(server)
        connection.writer.write(LARGE)
        await asyncio.sleep(0.3)
        connection.writer.transport.abort()

    async def crowd(server: Process) -> list:
        leaving = asyncio.create_task(leave(server))
        await asyncio.sleep(0.1)  # so that the picture of the client that leaves is decoded first
        late = await asyncio.gather(*(ask(server, LARGE) for _ in range(6)))
        await leaving
        return late

    with process(seconds_a_picture=4, deadline=1, threads=2) as server:
        late = asyncio.run(asyncio.wait_for(crowd(server), 30))
        assert {answer.status for answer in late} == {504}
        assert max(answer.seconds for answer in late) < 3  # one is being decoded beside the first, and five wait
        assert b"for fewer or smaller ones" in late[0].body
        assert server.metric('capserve_rejections_total{reason="late"') == 6
        assert server.metric('capserve_rejections_total{reason="gone"') == 1
        assert server.metric("capserve_rejections_total") == 7
        assert asyncio.run(ask(server, PREDICT)).status == 200
        assert server.metric("capserve_batch_images_sum") == 1


def test_slow_decoding_does_not_extend_shutdown_past_the_drain_limit():
    async def stop(server: Process) -> Answer:
        asking = asyncio.create_task(ask(server, LARGE))
        await asyncio.sleep(0.5)
        server.terminate()
        return await asking

    with process(seconds_a_picture=60, deadline=60, drain=1) as server:
        began = time.monotonic()
        answer = asyncio.run(asyncio.wait_for(stop(server), 30))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert server.popen.wait(10) == 0
        assert time.monotonic() - began < 8


def test_disconnecting_in_the_middle_of_a_body_causes_no_500(slow_server: Process):
    async def hang_up() -> None:
        for _ in range(20):
            connection = await Connection.to(slow_server)
            connection.writer.write(PREDICT[:-100])
            await connection.writer.drain()
            connection.writer.transport.abort()
        assert (await ask(slow_server, PREDICT)).status == 200

    asyncio.run(asyncio.wait_for(hang_up(), 30))
    assert slow_server.metric('capserve_requests_total{route="/predict",status="500"') == 0


def test_slow_senders_get_408_and_do_not_delay_others(slow_server: Process):
    async def dawdle(raw: bytes) -> int:
        connection = await Connection.to(slow_server)
        connection.writer.write(raw[:-40])
        answering = asyncio.create_task(connection.answer(time.perf_counter()))
        for byte in raw[-40:-1]:
            await asyncio.wait([answering], timeout=0.05)
            if answering.done():
                break
            connection.writer.write(bytes([byte]))
        answer = await answering
        await connection.close()
        assert 0.9 < answer.seconds < 4
        return answer.status

    async def both() -> None:
        raws = [request(path, DIGIT) for path in ("/predict", "/predict/batch", "/v2/models/tiny/infer")] * 7
        slow = [asyncio.create_task(dawdle(raw)) for raw in raws]
        await asyncio.sleep(0.2)
        prompt = await ask(slow_server, PREDICT)
        assert prompt.status == 200
        assert prompt.seconds < 0.6
        assert await asyncio.gather(*slow) == [408] * 21

    asyncio.run(asyncio.wait_for(both(), 30))


VALUES = json.dumps([0.0] * 784)
TENSOR = f'{{"inputs": [{{"name": "images", "shape": [1, 1, 28, 28], "datatype": "FP32", "data": {VALUES}}}]}}'.encode()


def test_a_body_may_take_longer_than_the_deadline():
    """The deadline limits our own time, and `patience` the sender's."""

    async def send_slowly(server: Process, raw: bytes) -> Answer:
        connection = await Connection.to(server)
        connection.writer.write(raw[:-10])
        await asyncio.sleep(0.8)
        answer = await connection.ask(raw[-10:])
        await connection.close()
        return answer

    async def all_routes(server: Process) -> list[Answer]:
        raws = [PREDICT, LARGE, request("/v2/models/tiny/infer", TENSOR, "application/json")]
        return await asyncio.gather(*(send_slowly(server, raw) for raw in raws))

    with process(deadline=0.5, patience=10) as server:
        answers = asyncio.run(asyncio.wait_for(all_routes(server), 30))
        assert [answer.status for answer in answers] == [200] * 3
        assert server.metric('capserve_rejections_total{reason="late"') == 0


def test_unfinished_request_heads_get_408_and_do_not_delay_others(slow_server: Process):
    async def stall() -> None:
        connections = await asyncio.gather(*(Connection.to(slow_server) for _ in range(100)))
        for connection in connections:
            connection.writer.write(b"POST /predict HTTP/1.1\r\nHost: loc")
            await connection.writer.drain()
        prompt = await ask(slow_server, PREDICT)
        assert prompt.status == 200
        assert prompt.seconds < 1
        answers = await asyncio.gather(*(connection.answer(time.perf_counter()) for connection in connections))
        assert {(answer.status, answer.headers["connection"]) for answer in answers} == {(408, "close")}
        assert {await connection.reader.read() for connection in connections} == {b""}
        await asyncio.gather(*(connection.close() for connection in connections))

    asyncio.run(asyncio.wait_for(stall(), 30))


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64, b"400"),  # TLS on a port that does not speak it
        (b"POST /predict HTTP/1.1\r\nHost: l\r\nContent-Length: many\r\n\r\n", b"400"),
        (b"POST /predict HTTP/1.1\r\nHost: l\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST /predict HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: chunked\r\n\r\nnot a length\r\n", b"400"),
        (b"POST /predict HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST /predict HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: l\r\n\r\n", b"431"),
        (b"\r\n\r\n\r\n", None),
    ],
    ids=[
        "tls",
        "non-numeric length",
        "negative length",
        "bad chunk",
        "gzip before chunked",
        "gzip and chunked headers",
        "long path",
        "blank lines",
    ],
)
def test_invalid_http_is_refused_or_disconnected(slow_server: Process, raw: bytes, status: bytes | None):
    async def babble() -> bytes:
        connection = await Connection.to(slow_server)
        connection.writer.write(raw)
        connection.writer.write_eof()
        said = await connection.reader.read()
        await connection.close()
        return said

    before = slow_server.metric("capserve_rejections_total")
    said = asyncio.run(asyncio.wait_for(babble(), 10))
    assert slow_server.metric("capserve_rejections_total") - before == (status is not None)
    assert said == b"" if status is None else said.startswith(b"HTTP/1.1 " + status)
    assert asyncio.run(ask(slow_server, PREDICT)).status == 200
