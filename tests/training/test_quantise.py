"""Which layers become int8, and how close the result stays."""

import logging

import onnx
import pytest
import torch

from tests.training.exporting import untrained
from training import graphs
from training.config import PRESETS, CapsuleNet, PlainNet
from training.quantise import int8, may_keep_capsules_float


def encoder_of(config: CapsuleNet | PlainNet) -> onnx.ModelProto:
    """An encoder graph with the weights of test_graphs.py, so that it is exported only once."""
    return graphs.encoder_graph(graphs.storable(untrained(config).restored()), config)


@pytest.mark.parametrize(
    ("name", "capsules", "float_layers"),
    [
        ("compact", False, 2),
        ("compact", True, 1),
        ("paper", False, 1),  # the layer that makes its capsules is nearly all the work
        ("paper", True, 1),
        ("pooled", False, 2),
        ("shared", False, 1),
        ("shared", True, 1),
    ],
)
def test_the_capsule_layer_stays_float_unless_it_is_most_of_the_work(name: str, capsules: bool, float_layers: int) -> None:
    config = PRESETS[name].network
    encoder = encoder_of(config)
    assert may_keep_capsules_float(encoder) is (name in ("compact", "pooled"))
    graph = int8(encoder, torch.rand(4, *config.image_shape), capsules=capsules).graph
    quantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    layers = [node for node in graph.node if node.op_type in ("Conv", "Gemm")]
    assert sum(node.input[1] not in quantised for node in layers) == float_layers
    assert len(layers) > float_layers


def test_one_outlier_hardly_changes_the_quantisation_scale() -> None:
    """The number of pictures makes some whole batches and a part of one."""
    config = PRESETS["tiny"].network
    encoder = encoder_of(config)

    def scale(pictures: torch.Tensor) -> float:
        """Scale of the first layer's output."""
        graph = int8(encoder, pictures, capsules=False).graph
        constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        return float(next(constants[node.input[1]] for node in graph.node if node.op_type == "QuantizeLinear"))

    pictures = torch.rand(510, *config.image_shape, generator=torch.Generator().manual_seed(0))
    usual = scale(pictures)
    pictures[0, 0, 0, 0] = 1_000
    assert 0.5 < scale(pictures) / usual < 2


def test_int8_is_silent_and_has_a_scale_for_each_channel(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = PRESETS["tiny"].network
    encoder = encoder_of(config)
    graph = int8(encoder, torch.rand(4, *config.image_shape), capsules=True).graph
    assert (capsys.readouterr().out, caplog.messages) == ("", [])
    logging.getLogger().warning("pre-processing")
    assert caplog.messages == ["pre-processing"]  # the log filter is gone
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    rounding = [node.input for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    weights = [names for names in rounding if names[0] in constants and constants[names[0]].ndim == 4]
    assert [constants[scales].shape for _, scales, _ in weights] == [constants[name].shape[:1] for name, _, _ in weights] != []
    assert {constants[zero].dtype.name for name, _, zero in rounding if name not in constants} == {"uint8"}
