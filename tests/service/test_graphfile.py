"""Weights in other files are found wherever ONNX allows them; the package onnx only writes the files here, and reads none."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from service import bundle
from service.bundle import checksum
from service.graphfile import holds_its_weights
from service.manifest import BundleError
from tests.service.bundles import TINY, external

VALUES = np.arange(4, dtype=np.float32)


def external_tensor() -> TensorProto:
    """A tensor whose values lie in another file."""
    tensor = TensorProto(name="w", dims=VALUES.shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights.bin")
    return tensor


def graph(*nodes: onnx.NodeProto, weights: tuple[TensorProto, ...] = ()) -> onnx.GraphProto:
    return helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, VALUES.shape)], weights)


def model(made: onnx.GraphProto, *functions: onnx.FunctionProto) -> bytes:
    opsets = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(made, functions=functions, opset_imports=opsets, ir_version=8).SerializeToString())


def constant(tensor: TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["w"], value=tensor)


def sparse(**parts: TensorProto) -> onnx.SparseTensorProto:
    here = {"values": numpy_helper.from_array(VALUES), "indices": numpy_helper.from_array(np.arange(4))}
    return onnx.SparseTensorProto(**(here | parts), dims=[4])


def initializer(made: onnx.SparseTensorProto) -> bytes:
    whole = graph()
    whole.sparse_initializer.append(made)
    return model(whole)


def attribute(**values: object) -> bytes:
    return model(graph(onnx.NodeProto(op_type="Any", attribute=[onnx.AttributeProto(name="a", **values)])))


def default(tensor: TensorProto) -> bytes:
    """A model with a function whose attribute has the tensor as its default."""
    made = helper.make_function("d", "f", [], ["w"], [], [])
    made.attribute_proto.add(name="a", type=onnx.AttributeProto.TENSOR, t=tensor)
    return model(graph(), made)


def trained(tensor: TensorProto, part: str) -> bytes:
    made = onnx.ModelProto.FromString(model(graph()))
    getattr(made.training_info.add(), part).CopyFrom(graph(weights=(tensor,)))
    return bytes(made.SerializeToString())


PLACES: dict[str, Callable[[TensorProto], bytes]] = {
    "initializer": lambda tensor: model(graph(weights=(tensor,))),
    "constant": lambda tensor: model(graph(constant(tensor))),
    "branch": lambda tensor: model(graph(helper.make_node("If", ["c"], ["w"], then_branch=graph(constant(tensor))))),
    "function": lambda tensor: model(graph(), helper.make_function("d", "f", [], ["w"], [constant(tensor)], [])),
    "sparse values": lambda tensor: initializer(sparse(values=tensor)),
    "sparse indices": lambda tensor: initializer(sparse(indices=tensor)),
    "sparse attribute": lambda tensor: attribute(sparse_tensor=sparse(values=tensor)),
    "sparse attributes": lambda tensor: attribute(sparse_tensors=[sparse(), sparse(values=tensor)]),
    "attributes": lambda tensor: attribute(tensors=[tensor]),
    "graphs": lambda tensor: attribute(graphs=[graph(constant(tensor))]),
    "function's default": default,
    "training, first": lambda tensor: trained(tensor, "initialization"),
    "training": lambda tensor: trained(tensor, "algorithm"),
}


@pytest.mark.parametrize("place", PLACES)
def test_external_weights_are_found_wherever_onnx_allows_them(place: str) -> None:
    assert holds_its_weights(PLACES[place](numpy_helper.from_array(VALUES, "w")))
    assert not holds_its_weights(PLACES[place](external_tensor()))


@pytest.mark.parametrize("name", ["encoder.onnx", "encoder.int8.onnx", "decoder.onnx"])
def test_the_tiny_bundles_graphs_hold_their_weights(name: str) -> None:
    assert holds_its_weights((TINY / name).read_bytes())


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes | int, key: Callable[[int], bytes] = varint) -> bytes:
    """Encodes a field as protobuf does; `key` may encode the number and the wire type in another way."""
    if isinstance(content, int):
        return key(number << 3) + varint(content)
    return key(number << 3 | 2) + varint(len(content)) + content


def with_more(*fields: bytes) -> bytes:
    """A model whose graph comes twice, the second time with an initializer that has these fields: protobuf merges the two."""
    tensor = TensorProto(name="w", dims=VALUES.shape, data_type=TensorProto.FLOAT).SerializeToString()
    return model(graph()) + field(7, field(5, tensor + b"".join(fields)))


PLACE = b"".join(field(number, text) for number, text in ((1, b"location"), (2, b"weights.bin")))
HIDDEN = {
    "keys of more than 32 bits": [
        field(number, value, lambda key: varint(key | 1 << 32)) for number, value in ((13, PLACE), (14, 1))
    ],
    "a location of more than 32 bits": [field(14, 1 | 1 << 32)],
    "keys of more bytes than they need": [field(14, 1, lambda key: bytes([key | 0x80, 0]))],
    "a length of more bytes than it needs": [field(9, b"")[:-1] + b"\x80\x00"],
    "a field of number 0": [field(0, 1)],
    "a group": [varint(30 << 3 | 3) + field(14, 1) + varint(30 << 3 | 4)],
    "a location that is taken back": [field(14, 1), field(14, 0)],
    "a place without a location": [field(13, PLACE)],
}


@pytest.mark.parametrize("fields", HIDDEN.values(), ids=HIDDEN)
def test_unusual_protobuf_encodings_do_not_hide_external_weights(fields: list[bytes]) -> None:
    assert holds_its_weights(with_more(field(9, VALUES.tobytes())))
    with contextlib.suppress(ValueError):
        assert not holds_its_weights(with_more(*fields))


@pytest.mark.parametrize("more", [field(14, 0), field((1 << 29) - 1, 1), field(30, (1 << 64) - 1)])
def test_unusual_but_harmless_protobuf_fields_are_accepted(more: bytes) -> None:
    """A location that is this file, the highest number of a field, and a negative number, which takes ten bytes."""
    assert holds_its_weights(with_more(more))


def test_onnx_runtime_reads_the_hidden_external_file(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(VALUES.tobytes())
    (tmp_path / "graph.onnx").write_bytes(with_more(*HIDDEN["keys of more than 32 bits"]))
    (read,) = onnxruntime.InferenceSession(tmp_path / "graph.onnx").run(None, {})
    np.testing.assert_array_equal(read, VALUES)


def test_onnx_runtimes_own_format_is_refused() -> None:
    with pytest.raises(ValueError, match="own format"):
        holds_its_weights(field(1, bytes(2) + b"ORTM"))


@pytest.mark.parametrize(
    "data", [b"\x3a", b"\x3a\x05ab", b"\x12\x03ab", b"\x3b", b"\xff" * 20, b"\x38\x01", b"\x0d\x00", field(1, 1 << 70)]
)
def test_data_that_is_not_a_graph_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="integer|field|wire type"):
        holds_its_weights(data)


def test_a_bundle_with_external_weights_is_refused(tmp_path: Path) -> None:
    folder = external(tmp_path / "tiny")
    onnxruntime.InferenceSession(folder / "encoder.onnx")  # which accepts it
    with pytest.raises(BundleError, match=r"encoder\.onnx: expected all weights in this file, found some in another; export it"):
        bundle.read(folder)


@pytest.mark.parametrize("name", ["encoder.onnx", "encoder.int8.onnx", "decoder.onnx"])
def test_no_graph_of_a_bundle_may_have_external_weights(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "tiny"))
    graph = onnx.load(folder / name)
    onnx.save(graph, folder / name, save_as_external_data=True, location="weights.bin", size_threshold=0)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = checksum(folder / name)
    manifest["version"] = bundle.fingerprint(manifest["files"]).hex()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=f"{name}: expected all weights in this file, found some in another"):
        bundle.read(folder)
