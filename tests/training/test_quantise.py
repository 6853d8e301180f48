"""Which layers become int8, and how near the result stays."""

import onnx
import pytest
import torch

from training import graphs
from training.config import PRESETS
from training.networks import Network
from training.quantise import int8


@pytest.mark.parametrize(("name", "float_layers"), [("compact", 1), ("paper", 0), ("pooled", 1), ("shared", 0)])
def test_the_layer_that_makes_capsules_stays_float_if_it_is_not_most_of_the_work(name: str, float_layers: int) -> None:
    config = PRESETS[name].network
    torch.manual_seed(0)
    network = graphs.storable(Network(config))
    graph = int8(graphs.encoder_graph(network, config), torch.rand(4, *config.image_shape)).graph
    quantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    layers = [node for node in graph.node if node.op_type in ("Conv", "Gemm")]
    assert sum(node.input[1] not in quantised for node in layers) == float_layers
    assert len(layers) > float_layers


def test_one_huge_value_leaves_the_others_their_levels() -> None:
    """Of as many pictures as make a batch and a part of one."""
    config = PRESETS["tiny"].network
    pictures = torch.rand(60, *config.image_shape, generator=torch.Generator().manual_seed(0))
    pictures[0, 0, 0, 0] = 1_000
    torch.manual_seed(0)
    graph = int8(graphs.encoder_graph(graphs.storable(Network(config)), config), pictures).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    (scale,) = [constants[node.input[1]] for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "images"]
    assert 0.9 < 255 * scale < 2
