"""Graphs on CUDA, as far as a machine without a GPU can show: what is refused, what is set, what runs alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from service import bundle, cuda, runtime, sessions
from service.engine import CapsNet
from service.errors import StartError
from tests.service.conftest import CPU, TINY


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
def test_auto_logs_the_gpu_package_or_the_missing_driver(
    driver: bool, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda.ort, "get_available_providers", lambda: [runtime.CPU])
    monkeypatch.setattr(cuda, "has_driver", lambda: driver)
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
def test_reason_extracts_the_cause_from_a_cuda_error(said: str, kept: str) -> None:
    """The first, here a third of its length, came where CUDA_VISIBLE_DEVICES hid a GPU: ONNX Runtime wraps the reason in C++."""
    assert cuda.reason(said) == kept


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_cuda_that_fails_to_load_is_refused_and_auto_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
def test_cuda_sessions_get_the_expected_runtime_settings(monkeypatch: pytest.MonkeyPatch, graphs: bool, enabled: int) -> None:
    """Checks the settings that ONNX Runtime gets, which takes no GPU."""
    asked: list[tuple[ort.SessionOptions, list[object]]] = []

    class Opened:
        def __init__(self, path: Path, options: ort.SessionOptions, providers: list[object], enable_fallback: int) -> None:
            assert cuda.lock._is_owned()
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


def test_cuda_sessions_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_cuda_session_is_freed_under_the_exclusive_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced model is freed while its successor serves: if another thread recorded a CUDA graph then, both would fail."""
    monkeypatch.setattr(cuda.CudaSession, "memory", "cpu")
    opened, freed = ort.InferenceSession, []

    def can_another_thread_record() -> bool:
        """Whether another thread could record a CUDA graph now."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: cuda.lock.acquire(blocking=False) and not cuda.lock.release()).result()

    class Watched:
        def __init__(self, path: Path, *_: object, **__: object) -> None:
            self._session = opened(path, runtime.options(1), providers=[runtime.CPU])

        def __getattr__(self, name: str) -> object:
            return getattr(self._session, name)

        def __del__(self) -> None:
            freed.append(can_another_thread_record())

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
