"""Whether an ONNX file holds all its weights, which must be known before it is trusted. Needs nothing but Python.

ONNX lets a tensor lie in another file, at a path of the graph's choosing, where no checksum covers it. So the file's protobuf
messages are walked here; serving does not need the package onnx. The walk is stricter than protobuf's own, which truncates
integers that are too long: what no exporter writes is refused, or two readers could read different things.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5  # protobuf's wire types
LONGEST_VARINT = 10  # bytes
LARGEST_KEY = (1 << 32) - 1
ORT_FORMAT = b"ORTM"  # at the fifth byte; ONNX Runtime then reads its own format, even if the bytes are protobuf too

# Where tensors can be, as field numbers of onnx.proto: message -> field -> message.
CHILDREN: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
EXTERNAL_DATA, DATA_LOCATION, IN_THIS_FILE = 13, 14, 0  # fields of a tensor, and the location's value for this file


def holds_its_weights(data: bytes) -> bool:
    """False if a tensor lies in another file. Raises ValueError for what is not protobuf as exporters write it."""
    if data[4:8] == ORT_FORMAT:
        raise ValueError("ONNX Runtime's own format")
    rest = [("model", memoryview(data))]
    while rest:
        kind, message = rest.pop()
        for number, value in _fields(message):
            if kind == "tensor" and (number == EXTERNAL_DATA or (number == DATA_LOCATION and value != IN_THIS_FILE)):
                return False
            child = CHILDREN[kind].get(number)
            if child is not None:
                if isinstance(value, int):
                    raise ValueError(f"an integer where a {kind} has a {child}")
                rest.append((child, value))
    return True


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields (number, value) of each field, in order; a value is an integer, or bytes, which may be a nested message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if not number or key > LARGEST_KEY:
            raise ValueError(f"a field of number {number}")
        if wire == VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == LENGTH:
            size, at = _varint(message, at)
        elif wire in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if wire == EIGHT_BYTES else 4
        else:
            raise ValueError(f"wire type {wire}")
        if size > len(message) - at:
            raise ValueError(f"a field of {size} bytes where {len(message) - at} are left")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Reads an integer; returns it and where it ends."""
    value = 0
    for place, byte in enumerate(message[at : at + LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            if place and not byte:
                raise ValueError("an integer of more bytes than it needs")
            return value, at + place + 1
    raise ValueError("an integer without an end")
