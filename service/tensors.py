"""Tensors as the Open Inference Protocol (V2) writes them: JSON and the binary tensor extension <-> arrays.

Pure: knows no HTTP, no model and no tensor's name; what a model takes and gives is passed in as `Port`s. A body is JSON, then
the raw tensors in the JSON's order, little-endian and row-major, with nothing between them; or only the bytes of the one input.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from service import faults
from service.bundle import Array, TensorSpec
from service.errors import MalformedRequest, TooLarge
from service.manifest import Manifest

FLOAT = "FP32"
WIRE = np.dtype("<f4")
SIZE_ADVICE = "; the header Inference-Header-Content-Length says where it ends: count its bytes, not its characters"
BINARY_ADVICE = (
    "; bytes that follow the JSON need the header Inference-Header-Content-Length, which says how long the JSON is, "
    "and a picture's file goes to POST /predict"
)
MOST_VALUES = 1 << 18  # as JSON: each becomes a Python object, and nothing else runs meanwhile
MOST_TENSORS = 8  # inputs, or outputs, of a request: a model here has one input and three outputs
MOST_AXES = 8
MOST_PARAMETERS = 16
LONGEST_ID = 1_024  # characters: the answer repeats it, as JSON in ASCII
LONGEST_AXIS = (1 << 31) - 1  # JSON's integers have no limit of their own


def _checked_parameters(given: object) -> object:
    """Reads null as none, as many clients write it. Counts first: of thousands pydantic would keep an error for each."""
    if isinstance(given, dict) and len(given) > MOST_PARAMETERS:
        raise ValueError(f"expected at most {MOST_PARAMETERS} parameters, found {len(given):,}")
    return {} if given is None else given


Parameters = Annotated[dict[str, str | int | float | bool], BeforeValidator(_checked_parameters)]


@dataclass(frozen=True)
class Port:
    """A tensor that a model takes or gives; -1 is an axis of any size."""

    name: str
    shape: tuple[int, ...]

    @staticmethod
    def of(spec: TensorSpec, manifest: Manifest) -> Port:
        return Port(spec.name, tuple(-1 if size is None else size for size in spec.shape(manifest)))

    def metadata(self) -> dict[str, JsonValue]:
        return {"name": self.name, "datatype": FLOAT, "shape": list(self.shape)}

    def admits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.shape) and all(
            expected in (-1, found) for found, expected in zip(shape, self.shape, strict=True)
        )


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class InputTensor(_Wire):
    name: str
    shape: list[Annotated[int, Field(ge=1, le=LONGEST_AXIS)]] = Field(max_length=MOST_AXES)
    datatype: str
    parameters: Parameters = {}
    data: list[Any] | None = Field(default=None, description="numbers, nested like the shape or flat in row-major order")


class RequestedOutput(_Wire):
    name: str
    parameters: Parameters = {}


class InferenceRequest(_Wire):
    id: str | None = Field(None, max_length=LONGEST_ID)
    parameters: Parameters = {}
    inputs: list[InputTensor] = Field(max_length=MOST_TENSORS)
    outputs: list[RequestedOutput] | None = Field(None, max_length=MOST_TENSORS)


@dataclass(frozen=True)
class Inference:
    """A parsed request: what to run, which outputs to return, and which of those as raw bytes."""

    id: str | None
    inputs: dict[str, Array]
    outputs: dict[str, bool]


def read(body: bytes, header: str | None, inputs: Sequence[Port], outputs: Sequence[Port]) -> Inference:
    """`header` is Inference-Header-Content-Length: how many bytes of the body are JSON; all of them if it is absent."""
    size = len(body) if header is None else _json_size(header, len(body))
    if header is not None and not size:
        return _read_raw(body, inputs, outputs)
    request = _parsed(body[:size], header is not None)
    given = [tensor.name for tensor in request.inputs]
    expected = {port.name: port for port in inputs}
    if sorted(given) != sorted(expected):
        raise MalformedRequest(f"expected the inputs {_listed(expected)}, each once; found {_listed(given)}")
    raw = _raw_parts(request.inputs, body, size, header is not None)
    arrays = {tensor.name: _array(tensor, expected[tensor.name], raw.get(tensor.name)) for tensor in request.inputs}
    return Inference(request.id, arrays, _requested_outputs(request, [port.name for port in outputs]))


def _read_raw(body: bytes, inputs: Sequence[Port], outputs: Sequence[Port]) -> Inference:
    """Reads a raw binary request: no JSON, only the bytes of the one input; all outputs are returned as raw bytes too."""
    (port,) = inputs
    row = math.prod(port.shape[1:]) * WIRE.itemsize
    if not body or len(body) % row:
        message = f"{port.name}: Inference-Header-Content-Length says there is no JSON: expected {row} bytes per picture"
        raise MalformedRequest(f"{message}, found {len(body)}")
    rows = np.frombuffer(body, WIRE).reshape(-1, *port.shape[1:]).astype(np.float32)
    return Inference(None, {port.name: rows}, {output.name: True for output in outputs})


def write(fields: Mapping[str, JsonValue], outputs: Mapping[str, Array], binary: Mapping[str, bool]) -> tuple[bytes, int | None]:
    """A response body from its leading fields and tensors, and how many bytes of it are JSON if not all are."""
    raw: list[bytes] = []
    tensors: list[str] = []
    for name, values in outputs.items():
        tensor: dict[str, JsonValue] = {"name": name, "datatype": FLOAT, "shape": list(values.shape)}
        if binary[name]:
            raw.append(values.astype(WIRE, copy=False).tobytes())
            tensors.append(_json({**tensor, "parameters": {"binary_data_size": len(raw[-1])}}))
        else:
            # Row by row: the JSON encoder keeps every other thread waiting until it is done.
            rows = ",".join(_json(row)[1:-1] for row in values.reshape(len(values), -1).tolist())
            tensors.append(f'{_json(tensor)[:-1]},"data":[{rows}]}}')
    text = f"{_json({**fields, 'outputs': []})[:-2]}{','.join(tensors)}]}}".encode()
    return b"".join((text, *raw)), len(text) if raw else None


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _json_size(header: str, total: int) -> int:
    if not (header.isascii() and header.isdigit() and len(header) < 20):
        message = "Inference-Header-Content-Length: expected the number of bytes of JSON that begin the body"
        raise MalformedRequest(f"{message}, found {header[:20]!r}")
    if int(header) > total:
        raise MalformedRequest(f"Inference-Header-Content-Length says {int(header)} bytes; the whole body has {total}")
    return int(header)


def count_values(text: bytes) -> int:
    """How many values the JSON can have: each follows a comma or a bracket, and a bracket is a value itself."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _parsed(text: bytes, has_header: bool) -> InferenceRequest:
    if count_values(text) > MOST_VALUES:
        raise TooLarge(f"more than {MOST_VALUES:,} values are JSON; send them as binary tensor data, with binary_data_size")
    try:
        return InferenceRequest.model_validate_json(text.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        advice = (SIZE_ADVICE if has_header else BINARY_ADVICE) if error.errors()[0]["type"] == "json_invalid" else ""
        raise MalformedRequest(faults.sentences(InferenceRequest, error, "the body")[0] + advice) from None


def _raw_parts(tensors: Sequence[InputTensor], body: bytes, start: int, has_header: bool) -> dict[str, memoryview]:
    """Splits what follows the JSON into the tensors that say how many bytes they have; nothing may be left over."""
    parts: dict[str, memoryview] = {}
    rest = memoryview(body)[start:]
    for tensor in tensors:
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            continue
        if not has_header:
            raise MalformedRequest(f"{tensor.name}: binary_data_size needs the header Inference-Header-Content-Length")
        if type(size) is not int or not 0 <= size <= len(rest):
            raise MalformedRequest(
                f"{tensor.name}: expected a binary_data_size of at most the {len(rest)} bytes that are left in the body, "
                f"found {json.dumps(size)[:40]}"
            )
        parts[tensor.name], rest = rest[:size], rest[size:]
    if len(rest):
        raise MalformedRequest(f"{len(rest)} bytes follow the last tensor; expected none")
    return parts


def _array(tensor: InputTensor, port: Port, raw: memoryview | None) -> Array:
    _refuse_unknown(tensor.name, tensor.parameters, "binary_data_size")
    if tensor.datatype != FLOAT:
        advice = "; a picture's file goes to POST /predict" if tensor.datatype == "BYTES" else ""
        raise MalformedRequest(f"{port.name}: expected datatype {FLOAT}, found {tensor.datatype[:20]}{advice}")
    if not port.admits(tensor.shape):
        raise MalformedRequest(f"{port.name}: expected shape {list(port.shape)}, found {tensor.shape}")
    if (raw is None) == (tensor.data is None):
        raise MalformedRequest(f"{port.name}: expected either data or binary_data_size")
    count = math.prod(tensor.shape)
    if raw is not None:
        if len(raw) != count * WIRE.itemsize:
            raise MalformedRequest(f"{port.name}: shape {tensor.shape} is {count * WIRE.itemsize} bytes, found {len(raw)}")
        return np.frombuffer(raw, WIRE).reshape(tensor.shape).astype(np.float32)  # a copy: the body may be unaligned
    shape, values = _numbers(tensor.name, tensor.data or [])
    if shape not in ([count], tensor.shape):
        raise MalformedRequest(
            f"{port.name}: shape {tensor.shape} is {count} values; expected data flat or nested so, found {shape[:MOST_AXES]}"
        )
    return values.reshape(tensor.shape)


def _numbers(name: str, data: list[Any]) -> tuple[list[int], Array]:
    """The shape of nested data, and its values, flat. numpy only gets numbers: one long text would make all values as long."""
    shape = [len(data)]
    while list in (kinds := set(map(type, data))):
        if kinds != {list} or len(lengths := set(map(len, data))) > 1:
            raise MalformedRequest(f"{name}: data is nested unevenly; expected rows of equal length")
        shape.append(lengths.pop())
        data = list(chain.from_iterable(data))
    if not kinds <= {int, float}:
        raise MalformedRequest(f"{name}: data holds something that is not a number")
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinite, which the caller judges
            return shape, np.array(data, np.float32)
    except OverflowError:  # an integer that no float can hold
        raise MalformedRequest(f"{name}: data holds a number that is too large") from None


def _requested_outputs(request: InferenceRequest, known: Sequence[str]) -> dict[str, bool]:
    """Output name -> whether as raw bytes. All outputs if none is named; an output's own parameter overrides the request's."""
    default = _flag("binary_data_output", request.parameters, False)
    if not request.outputs:
        return dict.fromkeys(known, default)
    names = [output.name for output in request.outputs]
    if len(set(names)) != len(names) or not set(names) <= set(known):
        raise MalformedRequest(f"expected outputs out of {_listed(known)}, each at most once; found {_listed(names)}")
    for output in request.outputs:
        _refuse_unknown(output.name, output.parameters, "binary_data")
    return {output.name: _flag("binary_data", output.parameters, default) for output in request.outputs}


def _refuse_unknown(name: str, parameters: Parameters, known: str) -> None:
    """Refuses unknown parameters: shared memory, classification and the like would change what the answer means."""
    unknown = sorted(parameters.keys() - {known})
    if unknown:
        raise MalformedRequest(f"{name}: expected no tensor parameter but {known}, found {_listed(unknown)}")


def _flag(name: str, parameters: Parameters, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise MalformedRequest(f"{name}: expected true or false")
    return value


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    shown = [name[:40] for name in list(names)[:8]]
    return ", ".join(shown) or "none"
