"""A bundle, opened: what it sees, what it draws, and which ones are refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from service import answer, bundle, cuda, engine, runtime, sessions
from service.bundle import IMAGES, LENGTHS, Array
from service.engine import CapsNet, expect_numbers, perturb
from service.errors import StartError, Unprocessable
from service.manifest import BundleError, write_manifest
from service.process import cpus
from tests.service.bundles import renewed
from tests.service.conftest import CPU, TINY, serving, settings
from tests.service.processes import ROOT

CPUINFO = Path("/proc/cpuinfo")
SATURATES = CPUINFO.exists() and " avx2" in CPUINFO.read_text() and not cpus.has_dot_products()


def test_drawings_of_the_models_prototypes_are_recognised(net: CapsNet) -> None:
    drawings = net.reconstruct(np.float32(net.manifest.prototypes), np.arange(10))
    seen = net.perceive(drawings, np.ones(10, bool))
    assert (seen.winners[:, 0] == np.arange(10)).sum() >= 9  # a mean pose need not be that of any picture
    np.testing.assert_allclose(seen.lengths, np.linalg.norm(seen.capsules, axis=2), atol=1e-3)
    assert (seen.errors < 0.02).all()
    assert seen.present.all()


def test_a_picture_gives_the_same_result_alone_and_in_a_batch(net: CapsNet) -> None:
    drawings = net.reconstruct(np.float32(net.manifest.prototypes), np.arange(10))
    together = net.perceive(drawings, np.ones(10, bool))
    for row in range(10):
        alone = net.perceive(drawings[row : row + 1], np.ones(1, bool))
        np.testing.assert_allclose(alone.lengths[0], together.lengths[row], atol=2e-3)
        np.testing.assert_allclose(alone.drawings[0], together.drawings[row], atol=2e-2)


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, [1]), (11, [11]), (12, [9, 3]), (16, [9, 7]), (20, [9, 11]), (64, [9] * 6 + [10])]
)
def test_a_large_batch_runs_in_pieces_and_comes_back_whole(rows: int, expected: list[int]) -> None:
    encoder = sessions.CpuSession(TINY / "encoder.onnx", bundle.ENCODER, bundle.read(TINY).manifest, threads=1)
    images, run, ran = np.random.default_rng(rows).random((rows, 1, 28, 28), np.float32), encoder._run, []

    def watched(inputs: list[Array]) -> list[Array]:
        ran.append(len(inputs[0]))
        return run(inputs)

    encoder._run = watched  # type: ignore[assignment,method-assign]
    for found, together in zip(encoder.run(images), run([images]), strict=True):
        np.testing.assert_allclose(found, together, atol=1e-5)
    assert ran == expected


def test_only_requested_drawings_are_made(net: CapsNet) -> None:
    drawings = net.reconstruct(np.float32(net.manifest.prototypes)[:3], np.arange(3))
    seen = net.perceive(drawings, np.array([True, False, True]))
    np.testing.assert_array_equal(np.isnan(seen.errors), [False, True, False])
    assert not seen.drawings[1].any()
    assert seen.drawings[2].any()


def test_the_longest_capsule_is_reported_however_short(net: CapsNet) -> None:
    """Every answer names an object."""
    blank = np.zeros((1, *net.manifest.image_shape), np.float32)
    lengths, capsules = net.classify(blank)
    assert len(net.perceive_encoded(blank, 0 * lengths, capsules, np.ones(1, bool)).objects(0)) == 1


def test_a_model_of_overlapping_digits_may_see_two(net: CapsNet) -> None:
    drawings = net.reconstruct(np.float32(net.manifest.prototypes), np.arange(10))
    pictures = np.concatenate([drawings, (drawings[:5] + drawings[5:]).clip(max=1)])
    second = np.sort(net.classify(pictures)[0], axis=1)[:, -2]
    usual = net.manifest.thresholds.model_copy(update={"presence": float(np.median(second))})
    both = replace(net, manifest=net.manifest.model_copy(update={"max_objects": 2, "thresholds": usual}))
    seen = both.perceive(pictures, np.ones(15, bool))
    assert seen.drawings.shape == (15, 2, 1, 28, 28)
    assert seen.present[:, 0].all()
    assert 1 < seen.present[:, 1].sum() < 14
    np.testing.assert_array_equal(seen.present[:, 1], np.sort(seen.lengths, axis=1)[:, -2] >= usual.presence)
    np.testing.assert_array_equal(seen.drawings.any(axis=(2, 3, 4)), seen.present)
    for row in range(15):
        said = answer.prediction(both.manifest, seen, row, "digit", drawings=True)
        assert len(said["objects"]) == seen.present[row].sum()
        assert said["label"] == said["objects"][0]["label"]


@pytest.mark.parametrize("provider", [runtime.CPU, runtime.CUDA])
def test_warm_up_covers_the_batch_sizes_of_each_provider(provider: str, net: CapsNet) -> None:
    """On CUDA every size runs twice: the first run of each is slow, and the second records a CUDA graph."""
    sizes: dict[str, list[int]] = {"encoder": [], "decoder": []}

    class Watched:
        def __init__(self, graph: str) -> None:
            self._graph, self._session = graph, getattr(net, graph)

        def run(self, *inputs: object) -> object:
            sizes[self._graph].append(len(inputs[0]))  # type: ignore[arg-type]
            return self._session.run(*inputs)

        warm = run

    device = replace(net.device, provider=provider)
    watched = replace(net, device=device, encoder=Watched("encoder"), decoder=Watched("decoder"))  # type: ignore[arg-type]
    watched.warm_up(max_batch=6)
    on_cuda = provider == runtime.CUDA
    assert set(sizes["encoder"]) == ({1, 2, 4, 6} if on_cuda else {1})
    assert set(sizes["decoder"]) >= (set(cuda.BUCKETS) if on_cuda else {1})
    assert all(found.count(size) >= 2 for found in sizes.values() for size in found) or not on_cuda


def test_perturb_moves_one_or_all_poses() -> None:
    pose = np.zeros(4, np.float32)
    np.testing.assert_allclose(perturb(pose, [1, 3, 1], [0.5, -0.25, 0.5]), [0, 1, 0, -0.25])
    np.testing.assert_allclose(perturb(np.zeros((2, 4), np.float32), [2], [0.1]), [[0, 0, 0.1, 0]] * 2)
    assert not pose.any()


def test_each_variant_loads_and_auto_picks_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bundle.read(TINY)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    for variant in ("fp32", "int8"):
        assert engine.load(made, variant, device).variant == variant  # type: ignore[arg-type]
    for faster, expected in ((True, "int8"), (False, "fp32")):
        monkeypatch.setattr(cpus, "is_faster_in_int8", lambda faster=faster: faster)
        assert engine._variant(made, "auto", device) == expected


def test_int8_lengths_match_those_of_the_unoptimised_graph() -> None:
    """Where sums of int8 products saturated, the network would take one digit for another."""
    made = bundle.read(TINY)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    as_written = ort.SessionOptions()
    as_written.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    reference = ort.InferenceSession(made.encoder("int8"), as_written, providers=["CPUExecutionProvider"])
    noise = np.random.default_rng(0).random((64, 1, 28, 28), np.float32)
    (expected,) = reference.run([LENGTHS.name], {IMAGES.name: noise})
    lengths, _ = engine.load(made, "int8", device).classify(noise)
    np.testing.assert_allclose(lengths, expected, atol=0.01)


@pytest.mark.skipif(not SATURATES, reason="sums of int8 products do not saturate on this processor")
@pytest.mark.parametrize("name", sorted(path.parent.name for path in (ROOT / "models").glob("*/encoder.int8.onnx")))
def test_saturating_int8_sums_are_harmless_or_fail_the_replay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bundle.read(ROOT / "models" / name)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    sound = engine.load(made, "int8", device)
    assert sound.replay < 0.002
    monkeypatch.setattr(cpus, "has_dot_products", lambda: True)  # so that they saturate after all
    try:
        saturating = engine.load(made, "int8", device)
    except BundleError:  # noticed: nothing else has changed since it loaded
        return
    pictures = _drawn(sound, 200)
    np.testing.assert_allclose(saturating.classify(pictures)[0], sound.classify(pictures)[0], atol=0.03)


def _drawn(net: CapsNet, count: int) -> Array:
    """Pictures (count, C, H, W) of as many objects as there may be, each near a prototype of its class."""
    random = np.random.default_rng(0)
    prototypes = np.float32(net.manifest.prototypes)  # (K, D)
    drawings = []
    for _ in range(net.manifest.max_objects):
        classes = random.integers(0, len(prototypes), count)
        poses = prototypes[classes] + random.normal(0, 0.08, (count, net.manifest.pose_size))
        drawings.append(net.reconstruct(poses.astype(np.float32), classes))
    return np.sum(drawings, axis=0).clip(max=1)


def test_a_network_that_gives_nan_for_a_blank_picture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a squash may divide by a length of 0: the bundle's example does not show it, and JSON has no NaN."""
    run = sessions.CpuSession.run

    def dividing(session: sessions.CpuSession, *inputs: Array) -> list[Array]:
        return [each if inputs[0].any() else each * np.nan for each in run(session, *inputs)]

    made = bundle.read(TINY)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    monkeypatch.setattr(sessions.CpuSession, "run", dividing)
    with pytest.raises(BundleError, match="tiny: expected finite numbers for a blank picture, found others"):
        engine.load(made, "auto", device)


@pytest.mark.parametrize("spoilt", ["lengths", "a capsule that is not the longest"])
def test_non_finite_outputs_are_422_and_the_next_picture_is_answered(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, seven: bytes, spoilt: str
) -> None:
    """Neither JSON nor pose tokens can hold NaN."""
    classify, strange = CapsNet.classify, {"is": True}

    def dividing(net: CapsNet, images: Array) -> tuple[Array, Array]:
        lengths, capsules = (made.copy() for made in classify(net, images))
        if strange["is"] and images.any():
            (lengths if spoilt == "lengths" else capsules)[:, 0] = np.inf
        return lengths, capsules

    monkeypatch.setattr(CapsNet, "classify", dividing)
    with serving(settings(), nets) as client:
        answer = client.post("/predict", content=seven, headers={"Content-Type": "image/png"})
        assert answer.status_code == 422
        assert "model tiny gives no finite numbers for picture 0" in answer.json()["detail"]
        pixels = {"name": "images", "shape": [1, 1, 28, 28], "datatype": "FP32", "data": [0.5] * 784}
        assert client.post("/v2/models/tiny/infer", json={"inputs": [pixels]}).status_code == 422
        assert client.get("/readyz").status_code == 200
        strange["is"] = False
        assert client.post("/predict", content=seven, headers={"Content-Type": "image/png"}).json()["label"] == "7"


@pytest.mark.parametrize("form", ["image/png", "application/json"])
def test_a_drawing_with_nan_pixels_is_422(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch, form: str, seven: bytes
) -> None:
    with serving(settings(), nets) as client:
        pose = client.post("/predict", content=seven).json()["objects"][0]["pose"]
        monkeypatch.setattr(
            CapsNet, "reconstruct", lambda net, poses, _: np.full((len(poses), *net.manifest.image_shape), np.nan)
        )
        for answer, what in (
            (client.get(f"/reconstruct?pose={pose}&dim=1&delta=0.1", headers={"Accept": form}), "pose"),
            (client.post("/predict", content=seven), "picture"),
        ):
            assert answer.status_code == 422
            assert f"model tiny gives no finite numbers for {what} 0" in answer.json()["detail"]


def test_a_graph_that_opens_but_fails_to_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("[ONNXRuntimeError] : 6 : Reshape: 3 pictures into 1\nand more")

    made = bundle.read(TINY)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    monkeypatch.setattr(sessions.CpuSession, "run", broken)
    with pytest.raises(BundleError, match=r"tiny: expected graphs that run on their own example, found: .*3 pictures into 1$"):
        engine.load(made, "fp32", device)


def test_a_bundle_replaced_while_it_is_opened_is_refused(tmp_path: Path) -> None:
    """Another takes the folder after the checksums were compared, and its own example agrees with its graphs."""
    made = bundle.read(renewed(tmp_path / "tiny", "the one"))
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    assert engine.load(made, "fp32", device).manifest.version == made.manifest.version
    renewed(made.folder, "the other")
    with pytest.raises(BundleError, match="tiny: another bundle took its place while it was opened; load it again"):
        engine.load(made, "fp32", device)


def test_a_missing_variant_is_refused_and_auto_uses_the_other(tmp_path: Path) -> None:
    made = bundle.read(TINY)
    files = {name: value for name, value in made.manifest.files.items() if name != "encoder.int8.onnx"}
    without = bundle.Bundle(tmp_path / "tiny", made.manifest.model_copy(update={"files": files}))
    shutil.copytree(TINY, without.folder)
    write_manifest(without.folder, without.manifest)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    with pytest.raises(StartError, match="has only fp32"):
        engine.load(without, "int8", device)
    assert engine.load(without, "auto", device).variant == "fp32"


def test_an_unreadable_or_mismatched_graph_raises_a_bundle_error(tmp_path: Path) -> None:
    made = bundle.read(TINY)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    broken = tmp_path / "encoder.onnx"
    broken.write_bytes(b"nonsense")
    with pytest.raises(BundleError, match=r"encoder\.onnx: expected a graph"):
        device.open(broken, bundle.ENCODER, made.manifest)
    with pytest.raises(BundleError, match="inputs of"):
        device.open(made.decoder, bundle.ENCODER, made.manifest)


def test_the_first_picture_without_finite_numbers_is_named() -> None:
    made = np.zeros((4, 3, 2), np.float32)
    expect_numbers("tiny", "picture", made)
    made[1, 2, 1], made[3] = np.inf, np.nan  # one value is enough
    with pytest.raises(Unprocessable, match="gives no finite numbers for picture 1: ask another"):
        expect_numbers("tiny", "picture", made)
