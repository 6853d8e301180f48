"""torch against ONNX Runtime: every preset, every routing, batches of one and five."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from service import bundle
from service.manifest import DECODER_FILE, ENCODER_FILES
from tests.training.exporting import TINY, Written, routed, untrained, written
from training import graphs
from training.capsules import SQUASH_CONSTANTS
from training.config import PRESETS
from training.errors import ExportError
from training.evaluate import TorchModel
from training.export import (
    PARITY,
    parity,
)
from training.routing import ROUTINGS
from training.runtime import OnnxModel


@pytest.fixture(scope="session", params=PRESETS)
def preset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(PRESETS[request.param].network, tmp_path_factory.mktemp(request.param))


def test_every_preset_is_equal_in_onnx(preset: Written) -> None:
    assert preset.worst <= PARITY


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """Exported once, since it does not depend on the routing that finds poses."""
    network, folder, _ = written(TINY, tmp_path_factory.mktemp("decoder"))
    return network.decoder, folder / DECODER_FILE


@pytest.mark.parametrize(
    ("iterations", "squash"),
    # Only one is varied at a time: squash is the same layer for any number of iterations, and their steps for any squash.
    [(3, "paper"), *((1, squash) for squash in SQUASH_CONSTANTS)],
)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_and_squash_is_equal_in_onnx(
    routing: str, iterations: int, squash: str, decoder: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    network, config = routed(routing, iterations, squash)
    network.decoder, drawing = decoder
    graphs.save_halved(graphs.encoder_graph(network, config), tmp_path / ENCODER_FILES["fp32"])
    assert parity(network, OnnxModel(tmp_path / ENCODER_FILES["fp32"], drawing), config.image_shape) <= PARITY


def test_rgb_and_other_sizes_are_equal_in_onnx(tmp_path: Path) -> None:
    assert written(replace(TINY, image_shape=(3, 36, 44), classes=7, iterations=2), tmp_path).worst <= PARITY


def test_graphs_are_static_but_for_the_batch(preset: Written) -> None:
    for file in (ENCODER_FILES["fp32"], DECODER_FILE):
        graph = onnx.load(preset.folder / file)
        operators = Counter(node.op_type for node in graph.graph.node)
        assert not graphs.FORBIDDEN & operators.keys()
        for tensor in (*graph.graph.input, *graph.graph.output):
            first, *others = tensor.type.tensor_type.shape.dim
            assert first.dim_param == "N"
            assert all(axis.dim_value > 0 for axis in others)
        assert not graph.graph.metadata_props
        assert not any(node.metadata_props or node.doc_string for node in graph.graph.node)  # no stack traces of this machine


@pytest.mark.parametrize("routing", ["dynamic", "agreement"])  # others may need to look at single votes
def test_onnx_runtime_does_not_transpose_the_votes(routing: str, tmp_path: Path) -> None:
    """In float32 it once transposed them just for the first sum: up to an eighth of an encoder's work."""
    graphs.save_halved(graphs.encoder_graph(*routed(routing)), tmp_path / ENCODER_FILES["fp32"])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(tmp_path / ENCODER_FILES["fp32"], options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    orders = [list(each.attribute[0].ints) for each in nodes if each.op_type == "Transpose"]
    assert [order for order in orders if len(order) == 4] == []  # votes have four axes; pictures do too, but are not transposed
    assert orders  # of the primary capsules


def test_batch_norm_is_folded_and_large_weights_are_halved_without_loss(tmp_path: Path) -> None:
    network, *_ = written(PRESETS["compact"].network, tmp_path)
    graph = onnx.load(tmp_path / ENCODER_FILES["fp32"]).graph
    assert "BatchNormalization" not in {node.op_type for node in graph.node}
    halved = [numpy_helper.to_array(weights) for weights in graph.initializer if weights.data_type == onnx.TensorProto.FLOAT16]
    assert sum(values.size for values in halved) > 500_000
    exact = network.encoder.routed.transforms.detach().numpy()
    assert any((values.astype("float32") == exact).all() for values in halved if values.shape == exact.shape)
    assert (tmp_path / ENCODER_FILES["fp32"]).stat().st_size < 1.4e6


def test_weights_of_64_values_are_halved_in_network_and_graph_alike(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)
    stored = graphs.storable(layer)  # type: ignore[arg-type]
    assert torch.equal(stored.weight, layer.weight.half().float())
    assert torch.equal(stored.bias, layer.bias)
    assert not torch.equal(stored.weight, layer.weight)  # the original keeps its weights
    weights = [numpy_helper.from_array(each.detach().numpy(), name) for name, each in layer.named_parameters()]
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 8]) for name in "xy"]
    node = onnx.helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], transB=1)
    graph = onnx.helper.make_model(onnx.helper.make_graph([node], "g", ends[:1], ends[1:], weights))
    graphs.save_halved(graph, tmp_path / "g.onnx")
    kinds = {each.name: each.data_type for each in onnx.load(tmp_path / "g.onnx").graph.initializer}
    assert kinds == {"weight.half": onnx.TensorProto.FLOAT16, "bias": onnx.TensorProto.FLOAT}


def test_a_graph_that_reads_its_batch_size_is_rejected() -> None:
    class Counting(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images * images.shape[0]

    spec = bundle.GraphSpec((bundle.LENGTHS,), (bundle.TensorSpec("counted", "float", "NK"),))
    with pytest.raises(ExportError, match="the exported graph holds Shape: expected unrolled routing and constant shapes"):
        graphs._graph(Counting(), (torch.zeros(2, 3),), spec)


def test_folding_batch_norm_changes_nothing_but_rounding(tmp_path: Path) -> None:
    network = untrained(PRESETS["compact"].network).restored()
    images = torch.rand(5, 1, 28, 28)
    before, after = (TorchModel(each).classify(images).lengths for each in (network, graphs.storable(network)))
    torch.testing.assert_close(before, after, atol=5e-3, rtol=0)


@pytest.mark.parametrize("routing", ["dynamic", "agreement"])
def test_zero_votes_give_the_same_lengths_in_onnx_as_in_torch(
    routing: str, decoder: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    """What is added under the root is so small that a graph optimizer may take it for zero."""
    network, config = routed(routing, iterations=2)  # a third would repeat the second
    with torch.no_grad():
        network.encoder.routed.transforms.zero_()
    images = torch.rand(2, *config.image_shape)
    graphs.save_halved(graphs.encoder_graph(network, config), tmp_path / ENCODER_FILES["fp32"])
    model = OnnxModel(tmp_path / ENCODER_FILES["fp32"], decoder[1])
    torch.testing.assert_close(model.classify(images).lengths, TorchModel(network).classify(images).lengths, atol=1e-6, rtol=0)
    assert float(model.classify(images).lengths.min()) > 1e-4  # the root of what was added
