"""Runs graphs on CUDA, or says why it cannot: which library is missing, what ONNX Runtime reported."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import runtime
from service.bundle import DTYPES, GraphSpec, TensorSpec
from service.errors import StartError
from service.manifest import Manifest
from service.runtime import CUDA, Arrays, Session, ort

DRIVER = "libcuda.so.1"  # NVIDIA's
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # batch sizes that CUDA pads to

# While ONNX Runtime records a CUDA graph in one thread, CUDA calls of others fail: allocations, copies, synchronisation. So one
# thread at a time uses CUDA, whatever its session; a binding allows only one user at a time anyway.
lock = threading.RLock()  # reentrant: its holder may trigger a CudaSession's __del__, which takes it too
LONGEST_TURN = 1.0  # seconds that __del__ waits, since it may run on the event loop; if it takes longer the runtime hangs


def settings(memory: int, graphs: bool) -> dict[str, Any]:
    """The provider's settings; `memory` is in GiB."""
    return {
        "cudnn_conv_algo_search": "HEURISTIC",  # an exhaustive search costs seconds for each new shape
        "arena_extend_strategy": "kSameAsRequested",
        "do_copy_in_default_stream": 1,  # 0 is racy
        "use_tf32": 0,  # its rounding moves drawings by 3e-3, more than a replay may; without it CUDA is within 1e-6 of the CPU
        "gpu_mem_limit": memory << 30,
        "enable_cuda_graph": int(graphs),
    }


class CudaSession(Session):
    """A session whose inputs and outputs stay at fixed places on the GPU, a set per batch size, as CUDA graphs require."""

    memory = "cuda"

    def __init__(self, path: Path, spec: GraphSpec, manifest: Manifest, settings: Mapping[str, Any]) -> None:
        self._session = open_session(path, settings)
        runtime.check(self._session, spec, manifest, path)
        self._spec, self._manifest = spec, manifest
        self._graphs = bool(settings["enable_cuda_graph"])
        self._buffers: dict[int, _Buffers] = {}
        self.nodes = runtime.nodes(self._session)

    def __del__(self) -> None:
        """Frees everything while no other thread records: that would spoil the recording, and nothing would be freed."""
        acquired = lock.acquire(timeout=LONGEST_TURN)
        self.__dict__.clear()
        if acquired:
            lock.release()

    def run(self, *inputs: NDArray[Any]) -> Arrays:
        most, count = BUCKETS[-1], len(inputs[0])
        parts = [self._run(*(each[first : first + most] for each in inputs)) for first in range(0, count, most)]
        return parts[0] if len(parts) == 1 else [np.concatenate(column) for column in zip(*parts, strict=True)]

    def _run(self, *inputs: NDArray[Any]) -> Arrays:
        count = len(inputs[0])
        size = next(bucket for bucket in BUCKETS if bucket >= count)
        with lock:
            buffers = self._buffers.get(size) or self._allocate_buffers(size)
            for value, array in zip(buffers.inputs, inputs, strict=True):
                padding = [(0, size - count)] + [(0, 0)] * (array.ndim - 1)
                value.update_inplace(np.ascontiguousarray(np.pad(array, padding)))
            self._session.run_with_iobinding(buffers.binding, buffers.options)
            return [value.numpy()[:count] for value in buffers.outputs]

    def _allocate_buffers(self, size: int) -> _Buffers:
        binding, options = self._session.io_binding(), ort.RunOptions()
        inputs = [self._allocate(tensor, size) for tensor in self._spec.inputs]
        outputs = [self._allocate(tensor, size) for tensor in self._spec.outputs]
        for tensor, value in zip(self._spec.inputs, inputs, strict=True):
            binding.bind_ortvalue_input(tensor.name, value)
        for tensor, value in zip(self._spec.outputs, outputs, strict=True):
            binding.bind_ortvalue_output(tensor.name, value)
        if self._graphs:
            options.add_run_config_entry("gpu_graph_id", str(size))
        buffers = self._buffers[size] = _Buffers(binding, options, inputs, outputs)
        return buffers

    def _allocate(self, tensor: TensorSpec, size: int) -> Any:
        shape = [size if axis is None else axis for axis in tensor.shape(self._manifest)]
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, DTYPES[tensor.dtype]), self.memory, 0)


@dataclass(frozen=True)
class _Buffers:
    binding: Any
    options: Any
    inputs: list[Any]
    outputs: list[Any]


def open_session(path: Path, settings: Mapping[str, Any]) -> Any:
    """Opens an ONNX Runtime session with every node on CUDA."""
    options = runtime.options(threads=1)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        with lock:
            session = ort.InferenceSession(path, options, providers=[(CUDA, dict(settings))], enable_fallback=0)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class below Exception
        raise StartError(f"CUDA does not run {path.name}: {_missing_library() or reason(str(error))}") from error
    provider = session.get_providers()[0]
    if provider != CUDA:  # what is available need not be what is used
        raise StartError(f"CUDA did not take {path.name}, {provider} did: {_missing_library() or 'ONNX Runtime logged why'}")
    return session


def reason(text: str) -> str:
    """Extracts what CUDA or cuDNN reported from ONNX Runtime's message, which wraps it in C++ code."""
    match = re.search(r"(CUDA|CUBLAS|CUDNN) failure \d+: [^;\n]+", text)
    return match[0].strip() if match else text.strip().partition("\n")[0]


def load_libraries() -> None:
    if CUDA not in ort.get_available_providers():
        raise StartError(
            f"onnxruntime {ort.__version__} has no {CUDA}: this is the CPU package. `pip uninstall onnxruntime`, "
            "then `pip install '.[gpu]'` in the checkout, or set CAPSERVE_DEVICE=cpu"
        )
    with redirect_stdout(sys.stderr):  # preload_dlls prints what it did not find
        ort.preload_dlls()  # CUDA and cuDNN from NVIDIA's wheels


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def _missing_library() -> str | None:
    """Names the first library that CUDA's provider needs and does not find; ONNX Runtime logs it, but does not raise it."""
    for library in (DRIVER, Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"):
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            name, _, why = str(error).partition(": ")
            if "cannot open shared object" in why:
                package = "CUDA or cuDNN; `pip install '.[gpu]'` in the checkout installs them"
                return f"{name} is missing, a part of {'the NVIDIA driver' if name == DRIVER else package}"
    return None
