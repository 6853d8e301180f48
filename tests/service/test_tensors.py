"""The V2 codec: what tritonclient may send in either form is read alike, and every inconsistency is a 400 that says what."""

import contextlib
import json
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service import bundle, tensors
from service.errors import MalformedRequest, TooLarge
from service.tensors import Port
from tests.service.bundles import TINY

IN = Port("x", (-1, 2))
OUT = [Port("a", (-1,)), Port("b", (-1, 3))]


def request(**changes: object) -> dict:
    return {"inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4.5]} | changes]}


def read(value: object, raw: bytes = b"", header: str | None = None) -> tensors.Inference:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return tensors.read(text + raw, str(len(text)) if raw and header is None else header, [IN], OUT)


def binary(raw: bytes, **changes: object) -> tensors.Inference:
    value = request(**({"parameters": {"binary_data_size": len(raw)}} | changes))
    del value["inputs"][0]["data"]
    return read(value, raw)


VALUES = np.array([[1, 2], [3, 4.5]], np.float32)


@pytest.mark.parametrize("data", [[1, 2, 3, 4.5], [[1, 2], [3, 4.5]]], ids=["flat", "nested"])
def test_json_flat_and_nested_are_the_same(data):
    np.testing.assert_array_equal(read(request(data=data)).inputs["x"], VALUES)


def test_raw_bytes_are_little_endian_rows_wherever_they_begin():
    raw = struct.pack("<4f", 1, 2, 3, 4.5)
    for padding in ("", "1", "12", "123"):  # the JSON's length decides whether the floats lie aligned
        value = request(parameters={"binary_data_size": 16}) | {"id": padding}
        del value["inputs"][0]["data"]
        array = read(value, raw).inputs["x"]
        np.testing.assert_array_equal(array, VALUES)
        assert array.flags.aligned
        assert array.flags.c_contiguous


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"datatype": "UINT8"}, "expected datatype FP32, found UINT8$"),
        ({"datatype": "BYTES"}, "expected datatype FP32, found BYTES; a picture's file goes to POST /predict"),
        ({"shape": [4]}, "expected shape"),
        ({"shape": [0, 2], "data": []}, r"inputs\[0\].shape\[0\]: expected a whole number from 1 to 2147483647, found 0"),
        ({"shape": [-1, 2]}, "from 1 to"),
        ({"shape": ["2", 2]}, "found the text 2$"),
        ({"shape": [2**31 - 1, 2]}, "values; expected"),
        ({"shape": [10**4298, 2]}, "found 10000000000000000000$"),
        ({"shape": [-(10**4298), 2]}, "from 1 to"),
        ({"shape": [3, 2]}, "6 values"),
        ({"data": [[1, 2], [3]]}, "unevenly"),
        ({"data": [[1, 2], 3, 4]}, "unevenly"),
        ({"data": [[[1], [2]], [3, 4]]}, "unevenly"),
        ({"data": [[1, 2, 3, 4.5]]}, "4 values"),
        ({"data": []}, r"4 values; expected data flat or nested so, found \[0\]"),
        ({"data": [[], []]}, r"4 values; expected data flat or nested so, found \[2, 0\]"),
        ({"data": ["1", "2", "3", "4"]}, "not a number"),
        ({"data": [None, 1, 2, 3]}, "not a number"),
        ({"data": [True, False, True, True]}, "not a number"),
        ({"data": [True, 0.5, 1, 0]}, "not a number"),
        ({"data": [[1, 2], [3, "4"]]}, "not a number"),
        ({"data": [{}, 1, 2, 3]}, "not a number"),
        ({"data": [10**400, 1, 2, 0.5]}, "too large"),
        ({"data": None}, "either data or"),
        ({"data": "AAAA"}, r"inputs\[0\].data: expected a list, found the text AAAA"),
        ({"data": "A" * 2000}, r"inputs\[0\].data: expected a list, found text of 2,000 characters"),
        ({"name": "y"}, "expected the inputs x"),
        ({"parameters": {"binary_data_size": 16}}, "Inference-Header-Content-Length"),
        ({"parameters": {"shared_memory_region": "mine"}}, "shared_memory_region"),
        ({"parameters": dict.fromkeys("abcdefghijklmnopq", 1)}, "expected at most 16 parameters, found 17"),
    ],
)
def test_an_inconsistent_input_is_rejected_with_the_reason(changes, says):
    with pytest.raises(MalformedRequest, match=says):
        read(request(**changes))


@pytest.mark.parametrize("size", [12, 20])
def test_raw_bytes_must_match_the_shape(size):
    with pytest.raises(MalformedRequest, match="16 bytes"):
        binary(bytes(size))


@pytest.mark.parametrize("size", [15, 17, -1, 2**70, 10**4299, 1.5, "16", "1" * 100_000, True])
def test_sizes_must_sum_to_the_body(size):
    with pytest.raises(MalformedRequest, match=r"are left in the body|bytes follow") as error:
        binary(bytes(16), parameters={"binary_data_size": size})
    assert len(str(error.value)) < 200


def test_a_long_text_among_the_numbers_takes_little_memory():
    sent = json.dumps(request(data=["x" * 1_000_000] + ["y"] * 300)).encode()
    tracemalloc.start()
    try:
        with pytest.raises(MalformedRequest, match="not a number"):
            read(sent)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("header", ["", "-1", "1e3", "9" * 30, "99999", "٣", "²", "1¹"])
def test_a_wrong_inference_header_length_is_rejected(header):
    with pytest.raises(MalformedRequest, match="Inference-Header-Content-Length"):
        read(request(), header=header)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"inputs": 1}', b'{"inputs": [], "id": 3}', b'{"inputs": []}'],
)
def test_a_body_that_is_no_request_is_rejected(body):
    with pytest.raises(MalformedRequest):
        read(body)


def test_a_request_id_is_kept_and_limited_in_length():
    assert read(request() | {"id": "é" * tensors.LONGEST_ID}).id == "é" * tensors.LONGEST_ID
    with pytest.raises(MalformedRequest, match="id: expected text of at most 1,024 characters"):
        read(request() | {"id": "é" * (tensors.LONGEST_ID + 1)})


def test_null_counts_as_a_missing_field():
    asked = request() | {"id": None, "parameters": None, "outputs": [{"name": "b", "parameters": None}]}
    asked["inputs"][0]["parameters"] = None
    assert read(asked).outputs == {"b": False}


def test_too_many_json_values_are_rejected():
    values = [0] * (tensors.MOST_VALUES + 1)
    with pytest.raises(TooLarge, match="binary tensor data"):
        read(request(data=values, shape=[len(values) // 2, 2]))


def test_a_json_length_beyond_the_body_is_rejected():
    body = json.dumps(request()).encode()
    with pytest.raises(MalformedRequest, match="the whole body has"):
        read(body, header=str(len(body) + 1))


def test_values_given_both_as_json_and_raw_are_rejected():
    with pytest.raises(MalformedRequest, match="either data or"):
        read(request(parameters={"binary_data_size": 16}), bytes(16))


def test_an_input_given_twice_is_rejected():
    value = request()
    with pytest.raises(MalformedRequest, match="each once"):
        read({"inputs": value["inputs"] * 2})


def wanted(outputs: object, **parameters: object) -> dict[str, bool]:
    return read(request() | {"outputs": outputs, "parameters": parameters}).outputs


def test_all_outputs_unless_named_and_per_output_flags_win():
    assert read(request()).outputs == {"a": False, "b": False}
    assert wanted([], binary_data_output=True) == {"a": True, "b": True}
    assert wanted([{"name": "b"}]) == {"b": False}
    assert wanted([{"name": "b"}, {"name": "a", "parameters": {"binary_data": False}}], binary_data_output=True) == {
        "b": True,
        "a": False,
    }


@pytest.mark.parametrize(
    "outputs",
    [[{"name": "c"}], [{"name": "a"}, {"name": "a"}], [{"name": "a", "parameters": {"classification": 3}}]],
    ids=["unknown", "twice", "unsupported parameter"],
)
def test_outputs_that_cannot_be_given_are_rejected(outputs):
    with pytest.raises(MalformedRequest):
        wanted(outputs)


def test_a_flag_that_is_neither_true_nor_false_is_rejected():
    with pytest.raises(MalformedRequest, match="true or false"):
        wanted(None, binary_data_output=1)


def test_writing_mixes_json_and_raw():
    values = {"a": np.array([0.5], np.float32), "b": np.array([[1, 2, 3]], np.float32)}
    body, size = tensors.write({"model_name": "m", "id": "7"}, values, {"a": False, "b": True})
    assert json.loads(body[:size]) == {
        "model_name": "m",
        "id": "7",
        "outputs": [
            {"name": "a", "datatype": "FP32", "shape": [1], "data": [0.5]},
            {"name": "b", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}},
        ],
    }
    assert body[size:] == struct.pack("<3f", 1, 2, 3)
    values["b"] = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    body, size = tensors.write({}, values, {"a": False, "b": False})
    assert size is None
    assert [output["data"] for output in json.loads(body)["outputs"]] == [[0.5], [1, 2, 3, 4, 5, 6]]


def test_ports_come_from_the_bundle_contract():
    manifest = bundle.read(TINY).manifest
    assert Port.of(bundle.CAPSULES, manifest).metadata() == {"name": "capsules", "datatype": "FP32", "shape": [-1, 10, 6]}


def test_a_json_error_mentions_the_inference_header():
    text = json.dumps(request()).encode()
    for header, size in ((None, len(text) + 1), (str(len(text) - 1), len(text))):
        with pytest.raises(MalformedRequest, match="the body is not JSON.*Inference-Header-Content-Length"):
            tensors.read((text + b"x")[:size], header, [IN], OUT)


def test_raw_bytes_without_json_are_the_input_and_get_raw_outputs():
    found = tensors.read(VALUES.tobytes(), "0", [IN], OUT)
    np.testing.assert_array_equal(found.inputs["x"], VALUES)
    assert (found.id, found.outputs) == (None, {"a": True, "b": True})


@pytest.mark.parametrize("body", [b"", bytes(9), b" " + json.dumps(request()).encode()], ids=["nothing", "some", "JSON"])
def test_raw_bytes_without_json_must_be_whole_rows(body):
    with pytest.raises(MalformedRequest, match=f"x: .*there is no JSON: expected 8 bytes per picture, found {len(body)}$"):
        tensors.read(body, "0", [IN], OUT)


@settings(deadline=None)
@given(st.binary(max_size=200), st.none() | st.text(max_size=5))
def test_any_bytes_are_read_or_raise_malformed_request(body, header):
    with contextlib.suppress(MalformedRequest):
        tensors.read(body, header, [IN], OUT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "y"]) | JSON,
        "shape": st.lists(st.integers(-1, 3) | st.integers(), max_size=3) | JSON,
        "datatype": st.sampled_from(["FP32", "BYTES"]) | JSON,
        "data": JSON,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "z"]), JSON, max_size=2) | JSON,
    },
)


@settings(deadline=None)
@given(FIELDS, st.binary(max_size=40))
def test_any_request_is_read_or_raises_malformed_request(fields, raw):
    value = {"inputs": [request()["inputs"][0] | fields]}
    try:
        found = read(value, raw)
    except MalformedRequest:
        return
    assert found.inputs["x"].shape[1] == 2
