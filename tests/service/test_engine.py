from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from service import answer, bundle, cuda, engine, runtime, sessions
from service.bundle import IMAGES, LENGTHS, Array
from service.engine import CapsNet, expect_numbers, perturb
from service.errors import StartError, Unprocessable
from service.manifest import BundleError, record
from service.process import cpus
from tests.service.bundles import renewed
from tests.service.conftest import TINY, serving, settings
from tests.service.processes import ROOT

CPU = {"threads": 1, "cuda_memory": 1, "cuda_graphs": False}
CPUINFO = Path("/proc/cpuinfo")
SATURATES = CPUINFO.exists() and " avx2" in CPUINFO.read_text() and not cpus.has_dot_products()


def test_pictures_of_its_own_prototypes_are_recognised(net: CapsNet) -> None:
    drawings = net.reconstruct(np.float32(net.manifest.prototypes), np.arange(10))
    seen = net.perceive(drawings, np.ones(10, bool))
    assert (seen.winners[:, 0] == np.arange(10)).sum() >= 9  # a mean pose need not be that of any picture
    np.testing.assert_allclose(seen.lengths, np.linalg.norm(seen.capsules, axis=2), atol=1e-3)
    assert (seen.errors < 0.02).all()
    assert seen.present.all()


def test_a_picture_means_the_same_alone_and_in_company(net: CapsNet) -> None:
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


def test_only_what_is_wanted_is_drawn(net: CapsNet) -> None:
    drawings = net.reconstruct(np.float32(net.manifest.prototypes)[:3], np.arange(3))
    seen = net.perceive(drawings, np.array([True, False, True]))
    np.testing.assert_array_equal(np.isnan(seen.errors), [False, True, False])
    assert not seen.drawings[1].any()
    assert seen.drawings[2].any()


def test_the_longest_capsule_is_seen_however_short(net: CapsNet) -> None:
    """Every answer names an object."""
    blank = np.zeros((1, *net.manifest.image_shape), np.float32)
    lengths, capsules = net.classify(blank)
    assert len(net.believe(blank, 0 * lengths, capsules, np.ones(1, bool)).objects(0)) == 1


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
def test_whatever_may_come_is_warm(provider: str, net: CapsNet) -> None:
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


def test_each_variant_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bundle.read(TINY)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    for variant in ("fp32", "int8"):
        assert engine.load(made, variant, device).variant == variant  # type: ignore[arg-type]
    for faster, expected in ((True, "int8"), (False, "fp32")):
        monkeypatch.setattr(cpus, "is_faster_in_int8", lambda faster=faster: faster)
        assert engine._variant(made, "auto", device) == expected


def test_int8_is_the_same_on_every_processor() -> None:
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


@pytest.mark.parametrize("dot_products", [True, False])
def test_convolutions_of_int8_are_computed_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dot_products: bool) -> None:
    """They are not computed as the file has them: rounded to int8, but multiplied in float."""
    monkeypatch.setattr(cpus, "has_dot_products", lambda: dot_products)
    options = sessions._options(1)
    options.optimized_model_filepath = str(tmp_path / "at_work.onnx")
    ort.InferenceSession(bundle.read(TINY).encoder("int8"), options, providers=["CPUExecutionProvider"])
    assert "QLinearConv" in {node.op_type for node in onnx.load(tmp_path / "at_work.onnx").graph.node}


@pytest.mark.skipif(not SATURATES, reason="sums of int8 products do not saturate on this processor")
@pytest.mark.parametrize("name", sorted(path.parent.name for path in (ROOT / "models").glob("*/encoder.int8.onnx")))
def test_sums_that_saturate_do_no_harm_or_a_replay_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_network_that_finds_no_numbers_in_a_blank_picture_is_a_broken_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_picture_of_which_a_model_makes_no_numbers_is_told_and_the_next_is_answered(
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
def test_a_drawing_that_is_no_numbers_is_told(
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


def test_a_graph_that_opens_and_does_not_run_is_a_broken_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("[ONNXRuntimeError] : 6 : Reshape: 3 pictures into 1\nand more")

    made = bundle.read(TINY)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    monkeypatch.setattr(sessions.CpuSession, "run", broken)
    with pytest.raises(BundleError, match=r"tiny: expected graphs that run on their own example, found: .*3 pictures into 1$"):
        engine.load(made, "fp32", device)


def test_a_bundle_that_was_replaced_while_it_was_opened_is_not_served_under_the_old_ones_name(tmp_path: Path) -> None:
    """Another takes the folder after the checksums were compared, and its own example agrees with its graphs."""
    made = bundle.read(renewed(tmp_path / "tiny", "the one"))
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    assert engine.load(made, "fp32", device).manifest.version == made.manifest.version
    renewed(made.folder, "the other")
    with pytest.raises(BundleError, match="tiny: another bundle took its place while it was opened; load it again"):
        engine.load(made, "fp32", device)


def test_a_variant_that_is_not_there_is_told(tmp_path: Path) -> None:
    made = bundle.read(TINY)
    files = {name: value for name, value in made.manifest.files.items() if name != "encoder.int8.onnx"}
    without = bundle.Bundle(tmp_path / "tiny", made.manifest.model_copy(update={"files": files}))
    shutil.copytree(TINY, without.folder)
    record(without.folder, without.manifest)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    with pytest.raises(StartError, match="has only fp32"):
        engine.load(without, "int8", device)
    assert engine.load(without, "auto", device).variant == "fp32"


def test_a_graph_that_onnx_runtime_does_not_open_is_a_broken_bundle(tmp_path: Path) -> None:
    made = bundle.read(TINY)
    device = sessions.device("cpu", probe=made.encoder("fp32"), **CPU)  # type: ignore[arg-type]
    broken = tmp_path / "encoder.onnx"
    broken.write_bytes(b"nonsense")
    with pytest.raises(BundleError, match=r"encoder\.onnx: expected a graph"):
        device.open(broken, bundle.ENCODER, made.manifest)
    with pytest.raises(BundleError, match="inputs of"):
        device.open(made.decoder, bundle.ENCODER, made.manifest)


# Without a GPU, CUDA can fail in three ways. In each of them `cuda` does not start, and `auto` says so and takes the CPU.


def test_cuda_without_its_package_is_refused_and_auto_takes_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    if runtime.CUDA in ort.get_available_providers():
        pytest.skip("this is the CUDA package")
    probe = TINY / "encoder.onnx"
    with pytest.raises(StartError, match=r"no CUDAExecutionProvider.*'\.\[gpu\]'"):
        sessions.device("cuda", probe=probe, **CPU)  # type: ignore[arg-type]
    caplog.set_level("INFO")
    assert sessions.device("auto", probe=probe, **CPU).provider == runtime.CPU  # type: ignore[arg-type]
    assert "running on the CPU" in caplog.text


@pytest.mark.parametrize(("driver", "told"), [(True, r"'.[gpu]'"), (False, "there is no NVIDIA driver here")])
def test_only_who_has_a_gpu_is_told_what_it_needs(
    driver: bool, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda.ort, "get_available_providers", lambda: [runtime.CPU])
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    caplog.set_level("INFO")
    sessions.device("auto", probe=TINY / "encoder.onnx", **CPU)  # type: ignore[arg-type]
    assert told in caplog.text


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (
            "/src/cuda_call.cc:146 CudaCall(ERRTYPE) [with bool THRW = true] CUDA failure 100: no CUDA-capable "
            "device is detected ; GPU=-1 ; hostname=vm ; expr=cudaSetDevice(info_.device_id);\nmore",
            "CUDA failure 100: no CUDA-capable device is detected",
        ),
        (
            "[ONNXRuntimeError] : 1 : FAIL : fallback to CPU EP has been explicitly disabled\nmore",
            "[ONNXRuntimeError] : 1 : FAIL : fallback to CPU EP has been explicitly disabled",
        ),
    ],
)
def test_of_what_cuda_says_the_reason_is_told(said: str, kept: str) -> None:
    """The first, here a third of its length, came where CUDA_VISIBLE_DEVICES hid a GPU: ONNX Runtime wraps the reason in C++."""
    assert cuda.reason(said) == kept


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_cuda_that_does_not_load_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The package has CUDA and the machine does not: a real session is asked for, and fails to open."""
    if runtime.CUDA in ort.get_available_providers():
        pytest.skip("this is the CUDA package")
    monkeypatch.setattr(ort, "get_available_providers", lambda: [runtime.CUDA, runtime.CPU])
    with pytest.raises(StartError, match=r"CUDA does not run encoder\.onnx"):
        sessions.device("cuda", probe=TINY / "encoder.onnx", **CPU)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda.ctypes, "CDLL", _without("libcublasLt.so.13"))
    with pytest.raises(StartError, match=r"libcublasLt\.so\.13 is missing, a part of CUDA"):
        sessions.device("cuda", probe=TINY / "encoder.onnx", **CPU)  # type: ignore[arg-type]
    device = sessions.device("auto", probe=TINY / "encoder.onnx", **CPU)  # type: ignore[arg-type]
    assert (device.provider, device.fell_back) == (runtime.CPU, True)
    assert "WARNING" in caplog.text


def _without(library: str) -> Callable[[str], None]:
    """Makes a library loader that finds the driver, but not one of the libraries of CUDA's provider."""

    def load(name: str) -> None:
        if name != "libcuda.so.1":
            raise OSError(f"{library}: cannot open shared object file: No such file or directory")

    return load


def test_a_session_that_fell_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime has been seen to give a CPU session without an error."""
    opened = ort.InferenceSession(TINY / "encoder.onnx", providers=[runtime.CPU])
    monkeypatch.setattr(ort, "get_available_providers", lambda: [runtime.CUDA, runtime.CPU])
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: opened)
    with pytest.raises(StartError, match="CPUExecutionProvider did"):
        sessions.device("cuda", probe=TINY / "encoder.onnx", **CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(("graphs", "enabled"), [(False, 0), (True, 1)])
def test_the_runtime_is_set_as_it_is_fastest(monkeypatch: pytest.MonkeyPatch, graphs: bool, enabled: int) -> None:
    """Checks the settings that ONNX Runtime gets, which takes no GPU."""
    asked: list[tuple[ort.SessionOptions, list[object]]] = []

    class Opened:
        def __init__(self, path: Path, options: ort.SessionOptions, providers: list[object], enable_fallback: int) -> None:
            assert cuda.alone._is_owned()
            asked.append((options, providers))

        def get_providers(self) -> list[str]:
            return [runtime.CUDA]

    monkeypatch.setattr(ort, "get_available_providers", lambda: [runtime.CUDA, runtime.CPU])
    monkeypatch.setattr(ort, "InferenceSession", Opened)
    monkeypatch.setattr(ort, "preload_dlls", lambda: None)
    sessions.device("cuda", threads=5, cuda_memory=3, cuda_graphs=graphs, probe=TINY / "encoder.onnx")
    ((options, ((provider, settings),)),) = asked  # type: ignore[misc]
    assert provider == runtime.CUDA
    assert settings == {
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "do_copy_in_default_stream": 1,
        "gpu_mem_limit": 3 << 30,
        "use_tf32": 0,
        "enable_cuda_graph": enabled,
    }
    assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"


def test_threads_of_the_runtime_are_as_many_as_asked_for_and_do_not_spin() -> None:
    options = runtime.options(threads=5)
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (5, 1)
    assert options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_bound_inputs_are_padded_to_buckets_and_cut_again(monkeypatch: pytest.MonkeyPatch, net: CapsNet) -> None:
    """Runs the CUDA session with its memory on the CPU: binding, padding and cutting are the same."""
    monkeypatch.setattr(cuda.CudaSession, "memory", "cpu")
    opened = ort.InferenceSession
    monkeypatch.setattr(cuda, "open_session", lambda path, _: opened(path, runtime.options(1), providers=[runtime.CPU]))
    made, settings = bundle.read(TINY), cuda.settings(memory=1, graphs=False)
    decoder = cuda.CudaSession(made.decoder, bundle.DECODER, made.manifest, settings)
    random = np.random.default_rng(0)
    for count in (1, 3, 64, 1, 80):  # numpy() does not copy from the CPU, so no run may use a bucket twice
        poses, classes = random.uniform(-0.5, 0.5, (count, 6)).astype(np.float32), random.integers(0, 10, count)
        np.testing.assert_allclose(decoder.run(poses, classes)[0], net.reconstruct(poses, classes), atol=1e-5)


def test_sessions_on_cuda_run_one_at_a_time_whichever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one session records a CUDA graph, another's copies would fail."""
    monkeypatch.setattr(cuda.CudaSession, "memory", "cpu")
    opened, inside, most = ort.InferenceSession, [], []

    class Watched:
        def __init__(self, path: Path) -> None:
            self._session = opened(path, runtime.options(1), providers=[runtime.CPU])

        def __getattr__(self, name: str) -> object:
            return getattr(self._session, name)

        def run_with_iobinding(self, *bound: object) -> None:
            inside.append(self)
            most.append(len(inside))
            time.sleep(0.05)
            self._session.run_with_iobinding(*bound)
            inside.remove(self)

    monkeypatch.setattr(cuda, "open_session", lambda path, _: Watched(path))
    made, settings = bundle.read(TINY), cuda.settings(memory=1, graphs=False)
    both = [cuda.CudaSession(made.decoder, bundle.DECODER, made.manifest, settings) for _ in range(2)]
    poses, classes = np.zeros((1, 6), np.float32), np.zeros(1, np.int64)
    with ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(session.run, poses, classes) for session in both * 3]:
            run.result()
    assert most == [1] * 6


def test_a_quick_graph_runs_on_one_thread() -> None:
    made = bundle.read(TINY)
    quick = sessions.on_cpu(made.encoder("fp32"), bundle.ENCODER, made.manifest, most=2)
    assert isinstance(quick, sessions.CpuSession)
    assert quick.runners == 1


@pytest.mark.parametrize(("seconds", "slow"), [(5.0, 5), (0.0, 3)])
def test_another_process_that_starts_beside_it_makes_no_graph_slow(
    seconds: float, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ran = sessions.CpuSession.run, []

    def disturbed(session: sessions.CpuSession, *inputs: np.ndarray) -> runtime.Arrays:
        ran.append(None)
        time.sleep(2 * sessions.QUICK)  # the other process has this core
        ends = time.thread_time() + 2 * sessions.QUICK
        while len(ran) <= slow and time.thread_time() < ends:  # and has emptied its caches
            pass
        return run(session, *inputs)

    monkeypatch.setattr(sessions.CpuSession, "run", disturbed)
    monkeypatch.setattr(sessions, "TRIAL", seconds)  # on a busy machine five runs may outlast the usual trial
    made = bundle.read(TINY)
    assert isinstance(sessions.on_cpu(made.encoder("fp32"), bundle.ENCODER, made.manifest, most=2), sessions.CpuSession)


def test_a_slow_graph_has_all_cores_alone_and_one_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "QUICK", 0.0)
    made = bundle.read(TINY)
    slow = sessions.on_cpu(made.encoder("fp32"), bundle.ENCODER, made.manifest, most=2)
    assert isinstance(slow, sessions.CoresSession)
    assert slow.runners == 2
    images = np.random.default_rng(0).random((3, *made.manifest.image_shape), np.float32)
    both_in, used = threading.Barrier(2), []

    def watched(name: str, session: sessions.CpuSession) -> None:
        run = session.run

        def wait_inside(*inputs: np.ndarray) -> runtime.Arrays:
            used.append(name)
            if len(used) <= 2:
                both_in.wait(10)
            return run(*inputs)

        monkeypatch.setattr(session, "run", wait_inside)

    watched("joint", slow._joint)
    watched("single", slow._single)
    with ThreadPoolExecutor(2) as pool:
        outputs = [each.result() for each in (pool.submit(slow.run, images), pool.submit(slow.run, images))]
    outputs.append(slow.run(images))
    assert used == ["joint", "single", "joint"]
    slow.warm(images)
    assert used[3:] == ["single", "joint"]
    for lengths, capsules in outputs[1:]:
        np.testing.assert_allclose(lengths, outputs[0][0], atol=1e-5)
        np.testing.assert_allclose(capsules, outputs[0][1], atol=1e-5)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes a machine of eight cores whose process is in a nested group, in both versions of cgroups."""
    monkeypatch.setattr(cpus, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cpus, "CGROUPS", tmp_path)
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "membership").write_text("4:cpu,cpuacct:/slice/unit\n3:memory:/elsewhere\n0::/slice/unit\n")
    for top in (tmp_path, tmp_path / "cpu"):
        (top / "slice" / "unit").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("folder", ["slice/unit", "slice", "."])
@pytest.mark.parametrize(
    ("written", "expected"), [("max 100000", 8), ("250000 100000", 3), ("10000 100000", 1), ("6400000 100000", 8)]
)
def test_threads_are_what_cgroup_and_affinity_leave(cgroups: Path, folder: str, written: str, expected: int) -> None:
    """Our group or any above it may hold the quota; as a container sees it, that is the topmost."""
    (cgroups / folder / "cpu.max").write_text(written)
    assert cpus.available() == expected


def test_threads_are_what_the_first_version_of_cgroups_leaves(cgroups: Path) -> None:
    assert cpus.available() == 8
    (cgroups / "cpu/slice/cpu.cfs_quota_us").write_text("150000\n")
    (cgroups / "cpu/slice/cpu.cfs_period_us").write_text("100000\n")
    assert cpus.available() == 2
    (cgroups / "membership").unlink()
    assert cpus.available() == 8


@pytest.mark.parametrize(
    ("text", "faster", "dot_products"),
    [
        ("flags\t\t: fpu avx2 avx512_vnni", True, True),
        ("Features\t: asimd asimddp", True, True),
        ("Features\t: asimd", False, False),
        ("flags\t\t: fpu avx2", True, False),
        ("flags\t\t: fpu avx", False, False),
        ("", False, False),
    ],
)
def test_int8_is_for_processors_that_are_faster_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, faster: bool, dot_products: bool
) -> None:
    monkeypatch.setattr(cpus, "CPUINFO", tmp_path / "cpuinfo")
    assert not cpus.is_faster_in_int8()
    assert not cpus.has_dot_products()
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}\n")
    assert (cpus.is_faster_in_int8(), cpus.has_dot_products()) == (faster, dot_products)


def test_the_runtime_tells_its_makers_nothing(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 sends telemetry from Linux too, unless it is told not to before it is imported."""
    (tmp_path / "onnxruntime.py").write_text("import os, sys; print(os.environ['ORT_DISABLE_TELEMETRY']); sys.exit()")
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment["PYTHONPATH"] = str(tmp_path)
    command = [sys.executable, "-c", "import service.sessions"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_first_of_which_a_network_makes_no_numbers_is_named() -> None:
    made = np.zeros((4, 3, 2), np.float32)
    expect_numbers("tiny", "picture", made)
    made[1, 2, 1], made[3] = np.inf, np.nan  # one value is enough
    with pytest.raises(Unprocessable, match="gives no finite numbers for picture 1: ask another"):
        expect_numbers("tiny", "picture", made)


def test_what_a_session_on_cuda_frees_it_frees_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced model is freed while its successor serves: if another thread recorded a CUDA graph then, both would fail."""
    monkeypatch.setattr(cuda.CudaSession, "memory", "cpu")
    opened, freed = ort.InferenceSession, []

    def somebody_records() -> bool:
        """Whether another thread could record a CUDA graph now."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: cuda.alone.acquire(blocking=False) and not cuda.alone.release()).result()

    class Watched:
        def __init__(self, path: Path, *_: object, **__: object) -> None:
            self._session = opened(path, runtime.options(1), providers=[runtime.CPU])

        def __getattr__(self, name: str) -> object:
            return getattr(self._session, name)

        def __del__(self) -> None:
            freed.append(somebody_records())

        def get_providers(self) -> list[str]:
            return [runtime.CUDA]

    monkeypatch.setattr(ort, "get_available_providers", lambda: [runtime.CUDA, runtime.CPU])
    monkeypatch.setattr(ort, "InferenceSession", Watched)
    monkeypatch.setattr(ort, "preload_dlls", lambda: None)
    made = bundle.read(TINY)
    device = sessions.device("cuda", threads=1, cuda_memory=1, cuda_graphs=True, probe=made.encoder("fp32"))
    assert freed == [False], "the probe's"
    session = device.open(made.decoder, bundle.DECODER, made.manifest)
    del session
    assert freed == [False, False]
