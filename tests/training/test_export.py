"""What an exported bundle holds, and what is not exported."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor

from service import bundle
from service.manifest import DECODER_FILE, ENCODER_FILES, EXAMPLE, BundleError
from tests.training.exporting import TINY, untrained
from training import graphs
from training.checkpoint import Checkpoint
from training.config import PRESETS, CapsuleNet, Config, Conv
from training.data import DataSet
from training.devices import software
from training.dimensions import Poses, aligned
from training.errors import ExportError
from training.evaluate import Evaluation, TorchModel, evaluate, fixed_batches
from training.export import (
    PARITY,
    PARITY_BATCHES,
    _Findings,
    _manifest,
    _measure,
    _samples,
    _write_example,
    calibration_pictures,
    export,
    measured_dimensions,
    measurement,
    parity,
    write_graphs,
)
from training.networks import Encoding, Network
from training.routing import ROUTINGS
from training.runtime import OnnxModel
from training.statistics import Statistics, usual_statistics


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


def test_every_second_example_picture_overlays_two_drawn_prototypes(shapes: bundle.Bundle) -> None:
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
def test_the_capsule_layer_becomes_int8_only_if_rounding_is_small(
    rounded: float, float_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.export.ROUNDING_LIMIT", rounded)
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


def test_a_network_whose_routing_sees_single_axes_is_not_rotated(
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


def test_weights_that_are_not_finite_are_not_exported(finished: Checkpoint, data: DataSet, tmp_path: Path) -> None:
    poisoned = {key: value * float("nan") if value.is_floating_point() else value for key, value in finished.average.items()}
    with pytest.raises(ExportError, match="expected finite weights"):
        export(replace(finished, average=poisoned), data, tmp_path / "shapes", quantised=False, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_gives_nan_for_some_picture_is_not_exported(
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
def test_exporting_an_unfinished_run_warns_also_if_it_learned_little(
    misread: int, told: bool, finished: Checkpoint, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.export.HIGH_ERROR", misread)
    said: list[str] = []
    half = replace(finished, history=finished.history[:1])
    assert export(half, data, tmp_path / "shapes", quantised=False, say=said.append).manifest.training.epochs == 1
    assert "this run is at epoch 1 of 2: exporting what it has learned so far" in said
    assert any(line.startswith("it has learned little") for line in said) == told


def test_a_bad_bundle_name_is_rejected_before_any_work(finished: Checkpoint, data: DataSet, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(BundleError, match="small letters.*found 'MyNet'"):
        export(finished, data, tmp_path / "MyNet", quantised=False, say=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("pairs", "shape", "expected"),
    [("none", (1, 28, 28), True), ("overlapping", (1, 36, 36), True), ("side_by_side", (1, 28, 56), False)],
)
def test_the_manifest_records_max_objects_and_whether_ink_is_boxed(
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


def test_the_manifest_records_unboxed_pictures_hardware_and_software(
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


def test_example_pictures_with_much_ink_are_clipped_to_one(tmp_path: Path) -> None:
    model = Astray(untrained(TINY).restored())
    model.drawing = 0.7
    _write_example({"fp32": model}, torch.zeros(10, TINY.pose_size), tmp_path)  # type: ignore[dict-item]
    with np.load(tmp_path / EXAMPLE) as arrays:
        assert 0.7 < arrays["reconstructions"].max() < 2
        assert arrays["images"][1::2].max() == arrays["images"][1::2].min() == 1


def test_the_manifest_has_the_runs_seed_and_its_routing_if_any(shapes: bundle.Bundle, data: DataSet) -> None:
    known = shapes.manifest
    findings = _Findings(0.0, Statistics(known.thresholds, known.references, known.prototypes), {}, ())
    for network, routing in ((TINY, {"algorithm": "dynamic", "iterations": 3}), (PRESETS["pooled"].network, None)):
        run = untrained(network)
        run = replace(run, config=replace(run.config, training=replace(run.config.training, seed=7)))
        values = _manifest(run, data, findings, ())
        assert (values["routing"], values["training"]["seed"]) == (routing, 7)


@pytest.mark.parametrize("where", ["with_ink", "blank", "drawing"])
def test_parity_covers_inked_pictures_blank_pictures_and_drawings(where: str) -> None:
    network = untrained(TINY).restored()
    model = Astray(network)
    assert parity(network, model, TINY.image_shape) == 0  # type: ignore[arg-type]
    setattr(model, where, 0.5)
    assert parity(network, model, TINY.image_shape) == pytest.approx(0.5)  # type: ignore[arg-type]


def test_every_encoder_is_measured_and_statistics_are_of_the_first(finished: Checkpoint, data: DataSet) -> None:
    class Reversed(TorchModel):
        def classify(self, images: Tensor) -> Encoding:
            return Encoding(*(part.flip(1) for part in super().classify(images)))

    (_, validation), network, settings = data.split(60), finished.restored(), finished.config.training
    right, wrong = TorchModel(network), Reversed(network)
    found = _measure({"fp32": right, "int8": wrong}, validation, settings, data.classes, 0.0)  # type: ignore[dict-item]
    expected = (evaluate(model, fixed_batches(validation, "none"), 10) for model in (right, wrong))
    assert found.errors["fp32"] != found.errors["int8"]
    assert [*found.errors.values()] == [measurement(each) for each in expected]
    assert found.statistics == usual_statistics(right, fixed_batches(validation, "none"), data.classes)
    assert found.dimensions == measured_dimensions(right, validation, settings)
    wrong.classify = lambda images: Encoding(torch.full((len(images), 10), torch.nan), torch.zeros(len(images), 10, 6))  # type: ignore[method-assign]
    with pytest.raises(ExportError, match="int8 gives no finite numbers for 60 of 60 validation pictures"):
        _measure({"fp32": right, "int8": wrong}, validation, settings, data.classes, 0.0)  # type: ignore[dict-item]


def test_dimensions_are_measured_on_pictures_augmented_as_in_training(finished: Checkpoint, data: DataSet) -> None:
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


def test_a_measurement_keeps_the_reconstruction_error() -> None:
    assert measurement(Evaluation(10, 1, torch.zeros(2, 2), 0.03)).reconstruction_error == 0.03
