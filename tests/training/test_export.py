"""torch against ONNX Runtime: every preset, every routing, batches of one and five, and what a bundle then holds."""

import json
import re
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from service import bundle
from service.manifest import DECODER_FILE, ENCODER_FILES, EXAMPLE, MANIFEST, BundleError
from training import graphs
from training.capsules import SQUASH_CONSTANTS
from training.checkpoint import Checkpoint
from training.config import PRESETS, CapsuleNet, Config, Conv, PlainNet
from training.data import DataSet
from training.devices import Place, software
from training.dimensions import Poses, aligned
from training.errors import ExportError
from training.evaluate import Evaluation, TorchModel, evaluate, fixed_batches
from training.export import (
    PARITY,
    PARITY_BATCHES,
    _Findings,
    _manifest,
    _measure,
    _other_seeds,
    _samples,
    _swap,
    _write_example,
    calibration_pictures,
    export,
    meaning,
    measurement,
    parity,
    record_test,
    write_graphs,
)
from training.networks import Encoding, Network
from training.routing import ROUTINGS
from training.runtime import OnnxModel
from training.statistics import Statistics, usual
from training.train import train

TINY = PRESETS["tiny"].network
assert isinstance(TINY, CapsuleNet)


def untrained(network: CapsuleNet | PlainNet) -> Checkpoint:
    """Random weights, and batch norm that has seen some pictures."""
    torch.manual_seed(0)
    made = Network(network)
    with torch.no_grad():
        made.encoder(torch.rand(2, *network.image_shape))
    config = Config("tiny", network, PRESETS["tiny"].training)
    return Checkpoint(config, tuple("0123456789"), "digest", "a machine", network=made.state_dict())


class Written(NamedTuple):
    """A network as a bundle holds it, its graphs, and by how much they differ."""

    network: Network
    folder: Path
    worst: float


def written(network: CapsuleNet | PlainNet, folder: Path) -> Written:
    made = graphs.storable(untrained(network).restored())
    models = write_graphs(made, network, folder, calibration=None)
    return Written(made, folder, parity(made, models["fp32"], network.image_shape))


def routed(routing: str, iterations: int = 3, squash: str = "paper") -> tuple[Network, CapsuleNet]:
    """Lengthens votes: untrained ones are so short that the number of iterations makes no difference."""
    config = replace(TINY, routing=routing, iterations=iterations, squash=squash)
    network = graphs.storable(untrained(config).restored())
    with torch.no_grad():
        network.encoder.routed.transforms *= 8
    return network, config


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
def test_onnx_runtime_need_not_write_the_votes_a_second_time(routing: str, tmp_path: Path) -> None:
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


def test_a_graph_that_asks_how_large_its_batch_is_is_refused() -> None:
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


@pytest.fixture(scope="session")
def finished(data: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same run as in test_cli.py, so that graphs, of equal weights, are exported only once."""
    training = replace(PRESETS["tiny"].training, dataset="folder", validation=60, epochs=2, batch_size=20)
    return train(replace(PRESETS["tiny"], training=training), data, tmp_path_factory.mktemp("run"), Place(torch.device("cpu")))


@pytest.fixture(scope="session")
def said() -> list[str]:
    """The messages of the export of `shapes`."""
    return []


@pytest.fixture(scope="session")
def shapes(finished: Checkpoint, data: DataSet, said: list[str], tmp_path_factory: pytest.TempPathFactory) -> bundle.Bundle:
    return export(finished, data, tmp_path_factory.mktemp("models") / "shapes", quantised=True, say=said.append)


def test_a_bundle_is_read_back_replayed_and_measured(finished: Checkpoint, shapes: bundle.Bundle, said: list[str]) -> None:
    manifest = shapes.manifest
    assert manifest.name == "shapes"
    assert manifest.variants == ("fp32", "int8")
    assert manifest.metrics.parity <= PARITY
    assert manifest.metrics.test == {}
    assert manifest.metrics.validation["fp32"].error.count == 60
    errors = ", ".join(f"{variant} {each.error.percent:.2f} %" for variant, each in manifest.metrics.validation.items())
    assert f"validation error: {errors}" in said
    assert manifest.dataset == "folder"
    assert manifest.training.data == finished.digest
    assert manifest.training.epochs == 2
    assert manifest.training.seconds == round(finished.seconds, 1) > 0
    assert [dict(row) for row in manifest.training.history] == [pytest.approx(row, rel=1e-4) for row in finished.history]
    network = finished.restored()
    counted = (manifest.training.parameters, manifest.training.encoder_parameters)
    assert counted == tuple(sum(each.numel() for each in part.parameters()) for part in (network, network.encoder))
    assert Config.from_dict(manifest.config) == finished.config
    for variant in manifest.variants:
        model = OnnxModel(shapes.encoder(variant), shapes.decoder)
        model.check(manifest)

        def encode(images: bundle.Array, model: OnnxModel = model) -> tuple[bundle.Array, bundle.Array]:
            lengths, capsules = model.classify(torch.from_numpy(images))
            return lengths.numpy(), capsules.numpy()

        worst = bundle.check_replay(
            shapes,
            variant,
            encode,
            lambda poses, classes, model=model: model.reconstruct(torch.from_numpy(poses), torch.from_numpy(classes)).numpy(),  # type: ignore[misc]
        )
        assert worst <= 1 / 8192  # the example's own rounding
    assert any("parity" in line for line in said)
    assert not any("replacing" in line or "single axes" in line or "learned so far" in line for line in said)


def test_the_example_is_of_prototypes_drawings_every_other_over_the_one_before(shapes: bundle.Bundle) -> None:
    example = shapes.example("fp32")
    assert example.classes.tolist() == list(range(6))
    assert example.poses.tolist() == torch.tensor(shapes.manifest.prototypes[:6]).tolist()
    expected = example.reconstructions.copy()
    expected[1::2] += example.reconstructions[::2]
    assert abs(example.images - expected.clip(max=1)).max() < 1 / 255
    levels = example.images * 255
    assert abs(levels - levels.round()).max() < 1e-4


def test_int8_holds_quantised_convolutions_and_float_routing(shapes: bundle.Bundle) -> None:
    graph = onnx.load(shapes.encoder("int8")).graph
    producers = {output: node.op_type for node in graph.node for output in node.output}
    kinds: dict[str, list[set[str | None]]] = {}
    for node in graph.node:
        kinds.setdefault(node.op_type, []).append({producers.get(name) for name in node.input})
    assert kinds["Conv"].count({"DequantizeLinear"}) == len(kinds["Conv"]) - 1  # all but the one that sees the picture
    assert not any("DequantizeLinear" in each for each in kinds["Conv"][:1] + kinds["MatMul"] + kinds["Exp"])


@pytest.mark.parametrize(("rounded", "float_layers"), [(1.0, 1), (0.0, 2)], ids=["little", "much"])
def test_the_layer_that_makes_capsules_is_in_int8_where_that_rounds_little(
    rounded: float, float_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.export.ROUNDED", rounded)
    network = replace(TINY, stem=(*TINY.stem, Conv(16, kernel=3)), primary=replace(TINY.primary, kernel=3), iterations=1)
    made = graphs.storable(untrained(network).restored())
    said: list[str] = []
    write_graphs(made, network, tmp_path, torch.rand(50, *network.image_shape), said.append)
    graph = onnx.load(tmp_path / ENCODER_FILES["int8"]).graph
    whole = {output for node in graph.node if node.op_type == "DequantizeLinear" for output in node.output}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 3
    assert sum(node.input[1] not in whole for node in convolutions) == float_layers
    assert [bool(re.match(r"in int8 lengths move by \S+, more than 0: ", each)) for each in said] == [True] * (float_layers - 1)


def test_exporting_again_replaces_a_bundle_and_nothing_else(finished: Checkpoint, data: DataSet, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "shapes"
    first = export(finished, data, folder, quantised=False, say=lambda _: None)
    (folder / f"{MANIFEST}.part").touch()  # left by an `evaluate --record` that was killed
    again = export(finished, data, folder, quantised=False, say=lambda _: None)
    assert first.manifest.fingerprint == again.manifest.fingerprint
    assert [path.name for path in folder.parent.iterdir()] == ["shapes"]
    assert sorted(contents(folder)) == sorted([*first.manifest.files, MANIFEST])
    other = tmp_path / "photos"
    other.mkdir()
    (other / "keep.txt").write_text("mine")
    with pytest.raises(ExportError, match="exists and is not a bundle; export replaces only bundles"):
        export(finished, data, other, quantised=False, say=lambda _: None)
    assert (other / "keep.txt").read_text() == "mine"
    (other / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(ExportError, match="photos holds keep.txt, and bundles do not; move it away"):
        export(finished, data, other, quantised=False, say=lambda _: None)
    assert (other / "keep.txt").read_text() == "mine"


def test_of_large_pictures_the_example_holds_as_many_as_a_service_takes(
    finished: Checkpoint, shapes: bundle.Bundle, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shapes"
    monkeypatch.setattr(bundle, "EXAMPLE_LIMIT", 20_000)
    few = export(finished, data, folder, quantised=False, say=lambda _: None)
    assert len(few.example("fp32").images) == 2
    before = contents(folder)
    monkeypatch.setattr(bundle, "EXAMPLE_LIMIT", 2_000)
    with pytest.raises(BundleError, match="bytes unpacked, more than 2000"):
        export(finished, data, folder, quantised=False, say=lambda _: None)
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("error", "told"), [(0.3, r"0\.\d+"), (float("nan"), "nan")], ids=["far", "nan"])
def test_a_graph_that_differs_from_torch_is_refused_and_the_bundle_before_it_stays(
    error: float,
    told: str,
    finished: Checkpoint,
    shapes: bundle.Bundle,
    data: DataSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one of many numbers is wrong, so not every difference is large, or NaN."""
    classify = OnnxModel.classify

    def astray(model: OnnxModel, images: Tensor) -> Encoding:
        found = classify(model, images)
        found.lengths[0, 0] += error
        return found

    folder = tmp_path / "shapes"
    shutil.copytree(shapes.folder, folder)
    before = contents(folder)
    monkeypatch.setattr(OnnxModel, "classify", astray)
    with pytest.raises(ExportError, match=f"torch and ONNX Runtime differ by {told}; expected at most 0.0001"):
        export(finished, data, folder, quantised=False, say=lambda _: None)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()], ids=["disk", "interrupt"])
def test_a_bundle_that_cannot_be_replaced_stands_where_it_stood(
    error: BaseException,
    finished: Checkpoint,
    shapes: bundle.Bundle,
    data: DataSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old bundle is moved aside, and moving the new one into place fails; all other renames are real."""
    folder, rename = tmp_path / "shapes", Path.rename
    shutil.copytree(shapes.folder, folder)
    before = contents(folder)

    def failing(path: Path, target: Path) -> Path:
        if target == folder and path.name == folder.name:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises((ExportError, KeyboardInterrupt), match="the disk is gone; what stood there is as it was|^$"):
        export(finished, data, folder, quantised=False, say=lambda _: None)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_a_new_bundle_stays_where_an_interrupt_comes_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, folder, rename = tmp_path / "draft", tmp_path / "shapes", Path.rename
    for each, content in ((draft, "new"), (folder, "old")):
        each.mkdir()
        (each / MANIFEST).write_text(content)

    def interrupted(path: Path, target: Path) -> None:
        rename(path, target)
        if path == draft:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _swap(draft, folder, tmp_path / "aside")
    assert contents(folder) == {MANIFEST: b"new"}


def test_a_bundle_of_another_captrain_is_replaced_and_what_goes_with_it_told(
    finished: Checkpoint, shapes: bundle.Bundle, data: DataSet, tmp_path: Path
) -> None:
    folder, said = tmp_path / "shapes", list[str]()
    shutil.copytree(shapes.folder, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["config"]["training"]["momentum"] = 0.9
    (folder / MANIFEST).write_text(json.dumps(manifest))
    made = export(finished, data, folder, quantised=False, say=said.append)
    assert Config.from_dict(made.manifest.config) == finished.config
    assert re.match(r"replacing the bundle in .*shapes \(.*, fp32 and int8, seed \d+, \d+ epochs\)$", said[0])
    assert said[1].startswith("what it knows of other seeds is lost with the replaced bundle: not a config of this version")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda run: {"config": replace(run.config, preset="paper")}, "tiny, and this run is of paper"),
        (lambda run: {"classes": ("one", "two")}, "the classes 0, 1, .*, and this run is of the classes one, two"),
    ],
    ids=["preset", "classes"],
)
def test_a_bundle_of_another_kind_is_not_replaced(
    other: Callable[[Checkpoint], dict[str, Any]],
    told: str,
    finished: Checkpoint,
    shapes: bundle.Bundle,
    data: DataSet,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "shapes"
    shutil.copytree(shapes.folder, folder)
    before = contents(folder)
    with pytest.raises(ExportError, match=f"holds a bundle of {told}: remove it, or choose"):
        export(replace(finished, **other(finished)), data, folder, quantised=False, say=lambda _: None)
    assert contents(folder) == before


def knowing(count: int, shapes: bundle.Bundle, folder: Path) -> Path:
    """A copy of the bundle with a record of another seed's errors, on `count` pictures."""
    shutil.copytree(shapes.folder, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    rate = {"errors": 3, "count": count, "percent": 300 / count, "low": 0.1, "high": 13.7}
    manifest["metrics"]["other_seeds"] = [{"seed": 7, "test": rate}]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_other_seeds_of_a_bundle_go_with_it_when_the_next_is_of_another_training(
    finished: Checkpoint, shapes: bundle.Bundle, data: DataSet, tmp_path: Path
) -> None:
    longer = replace(finished.config, training=replace(finished.config.training, learning_rate=0.02))
    for number, (run, why) in enumerate(
        [
            (replace(finished, history=finished.history[:1]), "a run that has not ended"),
            (replace(finished, config=longer), "training.learning_rate: 0.01 against 0.02"),
        ]
    ):
        folder, said = knowing(60, shapes, tmp_path / str(number) / "shapes"), list[str]()
        assert export(run, data, folder, quantised=False, say=said.append).manifest.metrics.other_seeds == ()
        assert f"what it knows of 1 other seeds is lost with the replaced bundle: {why}" in said


def test_what_goes_with_a_bundle_is_told_where_there_is_some(finished: Checkpoint, shapes: bundle.Bundle, tmp_path: Path) -> None:
    others, said = replace(finished, digest="0" * 64), list[str]()
    assert _other_seeds(tmp_path / "none", others, said.append) == ()
    assert said == []
    assert _other_seeds(shapes.folder, others, said.append) == ()
    assert [line.partition(" in ")[0] for line in said] == ["replacing the bundle"]
    folder = knowing(60, shapes, tmp_path / "shapes")
    assert _other_seeds(folder, others, said.append) == ()
    assert said[-1] == "what it knows of 1 other seeds is lost with the replaced bundle: other training pictures"
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["training"]["data"]  # as in older bundles
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert [each.seed for each in _other_seeds(folder, others, said.append)] == [7]


def test_test_figures_of_seeds_are_in_order_and_the_newest(shapes: bundle.Bundle, tmp_path: Path) -> None:
    made = bundle.read(knowing(60, shapes, tmp_path / "shapes"))
    few, many = (Evaluation(60, errors, torch.zeros(2, 2), 0.03) for errors in (1, 20))
    for others, expected in (({9: many, 3: many}, [(3, 20), (7, 3), (9, 20)]), ({9: few, 7: few}, [(3, 20), (7, 1), (9, 1)])):
        record_test(made, {"fp32": few}, others)
        made = bundle.read(made.folder)
        assert [(each.seed, each.test.errors) for each in made.manifest.metrics.other_seeds] == expected
    rate = made.manifest.metrics.test["fp32"].error
    assert (rate.low, rate.percent, rate.high) == pytest.approx((0.295, 1.667, 8.855), abs=1e-3)


@pytest.mark.parametrize(("count", "kept"), [(60, 1), (600, 0)])
def test_other_seeds_stay_beside_new_test_figures_where_they_are_of_as_many_pictures(
    count: int, kept: int, finished: Checkpoint, shapes: bundle.Bundle, data: DataSet, tmp_path: Path
) -> None:
    made = bundle.read(knowing(count, shapes, tmp_path / "shapes"))
    model = OnnxModel(made.encoder("fp32"), made.decoder)
    record_test(made, {"fp32": evaluate(model, fixed_batches(data.test, "none"), len(data.classes))}, {})
    assert len(bundle.read(made.folder).manifest.metrics.other_seeds) == kept


def test_a_routing_that_looks_at_single_axes_is_exported_as_it_was_learned(
    finished: Checkpoint, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_axes(votes: Tensor, iterations: int, squash: Callable[[Tensor], Tensor], voices: Tensor | None = None) -> Tensor:
        sums = votes.mean(dim=2)
        return squash(sums * sums.abs())

    monkeypatch.setitem(ROUTINGS, "axes", by_axes)
    assert isinstance(finished.config.network, CapsuleNet)
    run = replace(finished, config=replace(finished.config, network=replace(finished.config.network, routing="axes")))
    said: list[str] = []
    made = export(run, data, tmp_path / "axes", quantised=False, say=said.append)
    assert any("this routing looks at single axes" in line for line in said)
    images = torch.rand(20, *made.manifest.image_shape)
    learned = TorchModel(graphs.storable(run.restored())).classify(images)
    torch.testing.assert_close(OnnxModel(made.encoder("fp32"), made.decoder).classify(images), learned, atol=PARITY, rtol=0)


def test_a_full_disk_names_the_bundle_and_leaves_the_one_before(
    shapes: bundle.Bundle, finished: Checkpoint, data: DataSet, tmp_path: Path
) -> None:
    """A real failing write: the process may write no file over 8 kB, less than a graph takes."""
    before = shutil.copytree(shapes.folder, tmp_path / "shapes")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_192, hard))
    try:
        with pytest.raises(ExportError, match=f"could not write {before}: File too large; what stood there is as it was"):
            export(finished, data, before, quantised=False, say=str)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bundle.read(before).manifest == shapes.manifest
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_int8_scales_keep_their_precision(shapes: bundle.Bundle) -> None:
    """A bias scale of compact is about 3e-6, where float16 steps by 2 %."""
    graph = onnx.load(shapes.encoder("int8")).graph
    scales = {node.input[1] for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")}
    kinds = {weights.name: weights.data_type for weights in graph.initializer}
    assert {kinds[name] for name in scales} == {onnx.TensorProto.FLOAT}


def test_scales_of_many_channels_keep_their_precision_too(tmp_path: Path) -> None:
    scales = numpy_helper.from_array(np.full(64, 3e-6, np.float32), "scales")
    node = onnx.helper.make_node("DequantizeLinear", ["x", "scales"], ["y"], axis=1)
    ends = [
        onnx.helper.make_tensor_value_info(name, kind, [2, 64])
        for name, kind in (("x", onnx.TensorProto.INT8), ("y", onnx.TensorProto.FLOAT))
    ]
    graph = onnx.helper.make_model(onnx.helper.make_graph([node], "g", ends[:1], ends[1:], [scales]))
    graphs.save_halved(graph, tmp_path / "g.onnx")
    assert onnx.load(tmp_path / "g.onnx").graph.initializer[0] == scales


def test_weights_that_are_no_numbers_are_not_exported(finished: Checkpoint, data: DataSet, tmp_path: Path) -> None:
    poisoned = {key: value * float("nan") if value.is_floating_point() else value for key, value in finished.average.items()}
    with pytest.raises(ExportError, match="expected finite weights"):
        export(replace(finished, average=poisoned), data, tmp_path / "shapes", quantised=False, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("routing", ["dynamic", "agreement"])
def test_where_all_votes_are_zero_the_graph_has_numbers_as_torch_does(
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


def test_a_graph_that_makes_no_numbers_of_some_picture_is_not_exported(
    finished: Checkpoint, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classify = OnnxModel.classify

    def dividing(model: OnnxModel, images: Tensor) -> Encoding:
        found = classify(model, images)
        if len(images) > PARITY_BATCHES[-1]:  # not while it is compared with torch
            found.lengths[0, 0] = torch.nan
        return found

    monkeypatch.setattr(OnnxModel, "classify", dividing)
    with pytest.raises(ExportError, match=r"fp32 gives no finite numbers for \d+ of \d+ validation pictures"):
        export(finished, data, tmp_path / "shapes", quantised=False, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_pose_may_have_more_values_than_a_picture_has_pixels() -> None:
    """Its axes stay as they were learned, since not each of them can change something of its own."""
    config = replace(PRESETS["tiny"].network, image_shape=(1, 14, 14), pose_size=200)
    network = Network(config).eval()
    poses = Poses(torch.rand(30, 200), torch.arange(30) % 10)
    for before, after in zip(network.parameters(), aligned(network, poses).parameters(), strict=True):
        torch.testing.assert_close(before, after)


@pytest.mark.parametrize(("misread", "told"), [(-1, True), (100, False)])
def test_a_run_that_is_not_at_its_end_says_so_and_whether_it_has_learned_little(
    misread: int, told: bool, finished: Checkpoint, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.export.MISREAD", misread)
    said: list[str] = []
    half = replace(finished, history=finished.history[:1])
    assert export(half, data, tmp_path / "shapes", quantised=False, say=said.append).manifest.training.epochs == 1
    assert "this run is at epoch 1 of 2: exporting what it has learned so far" in said
    assert any(line.startswith("it has learned little") for line in said) == told


def test_a_bad_name_is_told_before_the_work(finished: Checkpoint, data: DataSet, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(BundleError, match="small letters.*found 'MyNet'"):
        export(finished, data, tmp_path / "MyNet", quantised=False, say=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("pairs", "shape", "expected"),
    [("none", (1, 28, 28), True), ("overlapping", (1, 36, 36), True), ("side_by_side", (1, 28, 56), False)],
)
def test_a_bundle_says_how_many_objects_a_picture_has_and_whether_its_ink_is_in_a_box(
    pairs: str, shape: tuple[int, int, int], expected: bool, boxed: DataSet, tmp_path: Path
) -> None:
    run = untrained(replace(TINY, image_shape=shape, iterations=1))
    training = replace(run.config.training, dataset="folder", validation=60, pairs=pairs)
    run = replace(run, config=replace(run.config, training=training), digest=boxed.digest)
    said: list[str] = []
    made = export(run, boxed, tmp_path / "made", quantised=False, say=said.append)
    assert any("not find ink" in line for line in said) != expected
    assert made.manifest.max_objects == (1 if pairs == "none" else 2)
    assert made.manifest.image_shape == shape
    assert made.manifest.boxed == expected  # side by side, they spread beyond the middle
    assert (made.folder / DECODER_FILE).exists()


def test_a_bundle_of_pictures_that_fill_their_frame_says_so_and_what_it_was_made_on(
    finished: Checkpoint, shapes: bundle.Bundle, said: list[str]
) -> None:
    assert not shapes.manifest.boxed
    assert "normalise=auto will only scale pictures, not find ink" in said[-1]
    assert shapes.manifest.training.hardware == f"{finished.hardware}, {finished.precision}"
    assert finished.precision in ("fp32", "bf16")
    assert shapes.manifest.training.software == finished.software == software()


class Astray(TorchModel):
    """Is wrong by these amounts on pictures with ink, on blank ones or in drawings; all are 0 at first."""

    with_ink = blank = drawing = 0.0

    def classify(self, images: Tensor) -> Encoding:
        found = super().classify(images)
        inked = images.flatten(1).any(dim=1, keepdim=True)
        return Encoding(found.lengths + torch.where(inked, self.with_ink, self.blank), found.capsules)

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor:
        return super().reconstruct(poses, classes) + self.drawing


def test_the_example_of_much_ink_is_no_blacker_than_black(tmp_path: Path) -> None:
    model = Astray(untrained(TINY).restored())
    model.drawing = 0.7
    _write_example({"fp32": model}, torch.zeros(10, TINY.pose_size), tmp_path)  # type: ignore[dict-item]
    with np.load(tmp_path / EXAMPLE) as arrays:
        assert 0.7 < arrays["reconstructions"].max() < 2
        assert arrays["images"][1::2].max() == arrays["images"][1::2].min() == 1


def test_a_manifest_has_its_runs_seed_and_routing_or_none(shapes: bundle.Bundle, data: DataSet) -> None:
    known = shapes.manifest
    findings = _Findings(0.0, Statistics(known.thresholds, known.references, known.prototypes), {}, ())
    for network, routing in ((TINY, {"algorithm": "dynamic", "iterations": 3}), (PRESETS["pooled"].network, None)):
        run = untrained(network)
        run = replace(run, config=replace(run.config, training=replace(run.config.training, seed=7)))
        values = _manifest(run, data, findings, ())
        assert (values["routing"], values["training"]["seed"]) == (routing, 7)


@pytest.mark.parametrize("where", ["with_ink", "blank", "drawing"])
def test_parity_is_of_pictures_with_ink_and_without_and_of_drawings(where: str) -> None:
    network = untrained(TINY).restored()
    model = Astray(network)
    assert parity(network, model, TINY.image_shape) == 0  # type: ignore[arg-type]
    setattr(model, where, 0.5)
    assert parity(network, model, TINY.image_shape) == pytest.approx(0.5)  # type: ignore[arg-type]


def test_each_encoder_is_measured_and_what_is_usual_is_the_first_ones(finished: Checkpoint, data: DataSet) -> None:
    class Reversed(TorchModel):
        def classify(self, images: Tensor) -> Encoding:
            return Encoding(*(part.flip(1) for part in super().classify(images)))

    (_, validation), network, settings = data.split(60), finished.restored(), finished.config.training
    right, wrong = TorchModel(network), Reversed(network)
    found = _measure({"fp32": right, "int8": wrong}, validation, settings, data.classes, 0.0)  # type: ignore[dict-item]
    expected = (evaluate(model, fixed_batches(validation, "none"), 10) for model in (right, wrong))
    assert found.errors["fp32"] != found.errors["int8"]
    assert [*found.errors.values()] == [measurement(each) for each in expected]
    assert found.usual == usual(right, fixed_batches(validation, "none"), data.classes)
    assert found.dimensions == meaning(right, validation, settings)
    wrong.classify = lambda images: Encoding(torch.full((len(images), 10), torch.nan), torch.zeros(len(images), 10, 6))  # type: ignore[method-assign]
    with pytest.raises(ExportError, match="int8 gives no finite numbers for 60 of 60 validation pictures"):
        _measure({"fp32": right, "int8": wrong}, validation, settings, data.classes, 0.0)  # type: ignore[dict-item]


def test_what_dimensions_do_is_seen_in_pictures_as_varied_as_those_learned(finished: Checkpoint, data: DataSet) -> None:
    (_, validation), settings = data.split(60), finished.config.training
    plain, augmented = (next(_samples(validation, replace(settings, augment=name))).images for name in ("none", "affine"))
    assert torch.equal(plain, next(fixed_batches(validation, "none")).images)
    assert not torch.equal(plain, augmented)


def test_int8_is_calibrated_on_pictures_that_were_learned(
    finished: Checkpoint, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Tensor] = []

    def enough(encoder: onnx.ModelProto, calibration: Tensor, capsules: bool) -> onnx.ModelProto:
        shown.append(calibration)
        raise ExportError("enough")

    monkeypatch.setattr("training.export.int8", enough)
    with pytest.raises(ExportError, match="enough"):
        export(finished, data, tmp_path / "shapes", quantised=True, say=lambda _: None)
    (learned, _), settings = data.split(60), finished.config.training
    assert torch.equal(shown[0], calibration_pictures(learned, settings))
    assert len(shown[0]) == 340
    assert calibration_pictures(learned, replace(settings, pairs="overlapping")).shape == (340, 1, 36, 36)


def test_what_was_measured_is_what_is_recorded() -> None:
    assert measurement(Evaluation(10, 1, torch.zeros(2, 2), 0.03)).reconstruction_error == 0.03
