"""No request is answered with a 500, whatever hypothesis makes of pictures and schemathesis of our own OpenAPI document."""

import json
from io import BytesIO
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.service.conftest import drawn, encoded, reaching

# One server for all examples, and as many examples as a test run has time for.
often = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

KINDS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "ICO", "PPM")
TYPES = ("image/png", "image/jpeg", "image/webp", "image/bmp", "application/octet-stream", "text/plain", "")
WHOLE = [encoded(drawn("7", 40).convert("P" if kind == "GIF" else "RGB"), kind) for kind in KINDS]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A picture file with some bytes changed, and perhaps cut short."""
    data = bytearray(draw(st.sampled_from(WHOLE)))
    for _ in range(draw(st.integers(0, 6))):
        data[draw(st.integers(0, min(len(data), 400) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def check_answer(response: httpx.Response) -> None:
    assert response.status_code < 500, (response.status_code, response.text)
    if response.status_code >= 400:
        problem = response.json()
        assert response.headers["content-type"] == "application/problem+json"
        assert problem["status"] == response.status_code
        assert problem["detail"]
        assert "Traceback" not in response.text


@pytest.fixture(scope="module")
def fuzzed(server: str):
    with reaching(server) as client:
        yield client


@often
@given(damaged() | st.binary(max_size=300), st.sampled_from(TYPES))
def test_raw_bodies(fuzzed: httpx.Client, data: bytes, kind: str):
    check_answer(fuzzed.post("/predict", content=data, headers={"content-type": kind}))


@often
@given(st.lists(damaged() | st.binary(max_size=50), max_size=3))
def test_uploads(fuzzed: httpx.Client, files: list[bytes]):
    check_answer(fuzzed.post("/predict/batch", files=[("file", ("x.png", data)) for data in files]))


@often
@given(st.binary(max_size=200), st.text("ab-'()+_,./:=?", max_size=20))
def test_broken_multipart(fuzzed: httpx.Client, middle: bytes, boundary: str):
    body = b"--" + boundary.encode() + b"\r\n" + middle + b"\r\n--" + boundary.encode() + b"--\r\n"
    check_answer(fuzzed.post("/predict", content=body, headers={"content-type": f"multipart/form-data; boundary={boundary}"}))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["image", "images", "x"]), inner, max_size=3),
    max_leaves=6,
)


@often
@given(ANYTHING | st.binary(max_size=50), st.sampled_from(["/predict", "/predict/batch", "/v2/models/tiny/infer"]))
def test_any_json(fuzzed: httpx.Client, value: object, path: str):
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    check_answer(fuzzed.post(path, content=content, headers={"content-type": "application/json"}))


NUMBERS = st.floats() | st.integers(-3, 20) | st.sampled_from(["", "nan", "1e999", "٣", "0x1", " 1 "])


@often
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["dim", "delta", "label", "pose", "size", "as_label", "low", "high", "steps", "from", "to", "model"]),
            NUMBERS | st.text(max_size=12),
        ),
        max_size=6,
    ),
    st.sampled_from(["/reconstruct", "/reconstruct/sweep", "/reconstruct/morph"]),
)
def test_any_query(fuzzed: httpx.Client, query: list, path: str):
    check_answer(fuzzed.get(path, params=query))


@often
@given(st.binary(max_size=80), st.text(max_size=10))
def test_any_path(fuzzed: httpx.Client, raw: bytes, text: str):
    quoted = "".join(f"%{byte:02x}" for byte in raw)
    for path in (f"/models/{quoted}", f"/v2/models/{quoted}/versions/{quoted}", f"/{quoted}"):
        check_answer(fuzzed.get(path))


@pytest.mark.parametrize("side", [(60_000, 500), (1, 1), (1, 3_000)])
def test_extreme_picture_sizes(fuzzed: httpx.Client, side: tuple[int, int]):
    buffer = BytesIO()
    Image.new("1", side).save(buffer, "PNG")
    check_answer(fuzzed.post("/predict", content=buffer.getvalue(), headers={"content-type": "image/png"}))


def sent(operation: Any, mode: Any) -> int:
    """Sends an operation's requests, and counts them. Their answers must be as /openapi.json says: code generators rely on it."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    told = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
    count = 0

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal count
        count += 1
        answer = case.call()
        if answer.status_code != 431:  # a head so large that no operation saw it
            case.validate_response(answer, checks=[not_a_server_error, *told])

    send()
    return count


def test_answers_conform_to_our_openapi_document(server: str):
    """Tries every operation with what its schema allows and with what it does not."""
    import schemathesis  # here, or each process that collects tests would spend a second on it

    operations = [each.ok() for each in schemathesis.openapi.from_url(f"{server}/openapi.json").get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        assert sent(operation, schemathesis.GenerationMode.POSITIVE) > 0, operation.label
        if operation.query or operation.body:  # in a path alone, any text is valid
            assert sent(operation, schemathesis.GenerationMode.NEGATIVE) > 0, operation.label
