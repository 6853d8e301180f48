"""Exports a network to two ONNX graphs, encoder and decoder, that meet service.bundle's specs; only the batch is dynamic.

Independent of runs, data and manifests.
"""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from service.bundle import DECODER, ENCODER, GraphSpec
from training.config import CapsuleNet, PlainNet
from training.errors import ExportError
from training.networks import Encoding, Network

OPSET = 20
FORBIDDEN = frozenset(("Loop", "If", "Scan", "Shape"))  # control flow rules out CUDA graphs; a Shape chain runs on the CPU
SMALLEST_HALVED = 64  # values; smaller tensors stay as they are, since a Cast would take more space than it saves


class _Encoder(nn.Module):
    """The encoder with a plain tuple as output, whose elements the exporter names."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        encoding: Encoding = self.encoder(images)
        return encoding.lengths, encoding.capsules


def storable(network: Network) -> Network:
    """The network as a bundle holds it: batch norm folded into its convolutions, large weights rounded to float16."""
    network = copy.deepcopy(network).cpu().eval()
    for block in network.modules():
        if isinstance(block, nn.Sequential):
            _fold_batch_norm(block)
    with torch.no_grad():
        for weights in network.parameters():
            if weights.numel() >= SMALLEST_HALVED:
                weights.copy_(weights.half().float())
    return network


def encoder_graph(network: Network, config: CapsuleNet | PlainNet) -> onnx.ModelProto:
    return _graph(_Encoder(network.encoder), (torch.zeros(2, *config.image_shape),), ENCODER)


def decoder_graph(network: Network, config: CapsuleNet | PlainNet) -> onnx.ModelProto:
    poses, classes = torch.zeros(2, config.pose_size), torch.zeros(2, dtype=torch.int64)
    return _graph(network.decoder, (poses, classes), DECODER)


def save_halved(graph: onnx.ModelProto, path: Path) -> None:
    """Write a graph with its large weights as float16 and a Cast after each; ONNX Runtime folds the Casts away at load."""
    graph = copy.deepcopy(graph)
    casts = []
    quantising = [node for node in graph.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    scales = {node.input[1] for node in quantising}  # as small as 1e-6, where float16 has few digits
    for weights in graph.graph.initializer:
        values = numpy_helper.to_array(weights)
        if values.dtype != np.float32 or values.size < SMALLEST_HALVED or weights.name in scales:
            continue
        name = weights.name
        weights.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f"{name}.half"))
        casts.append(helper.make_node("Cast", [f"{name}.half"], [name], to=onnx.TensorProto.FLOAT))
    del graph.graph.value_info[:]  # intermediate shapes, which every runtime infers anew
    nodes = [*casts, *graph.graph.node]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    onnx.checker.check_model(graph, full_check=True)
    onnx.save(graph, path)


def _graph(module: nn.Module, example: tuple[Tensor, ...], spec: GraphSpec) -> onnx.ModelProto:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists packages we do not use
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # from torch's exporter, about torch's own internals
        warnings.filterwarnings("ignore", message=".*axis name: N will not be used.*")
        program = torch.onnx.export(
            module.eval(),
            example,
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[tensor.name for tensor in spec.outputs],
            dynamic_shapes=tuple({0: torch.export.Dim("N")} for _ in example),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    assert program is not None
    graph = program.model_proto
    found = sorted(FORBIDDEN & {node.op_type for node in graph.graph.node})
    if found:
        raise ExportError(f"the exported graph holds {', '.join(found)}: expected unrolled routing and constant shapes")
    del graph.graph.metadata_props[:]
    for node in graph.graph.node:  # stack traces, which would reveal the machine it was exported on
        del node.metadata_props[:]
        node.doc_string = ""
    return graph


def _fold_batch_norm(block: nn.Sequential) -> None:
    layers = list(block)
    for index, layer in enumerate(layers[1:], start=1):
        if isinstance(layer, nn.BatchNorm2d):
            before = layers[index - 1]
            assert isinstance(before, nn.Conv2d)
            block[index - 1], block[index] = fuse_conv_bn_eval(before, layer), nn.Identity()
