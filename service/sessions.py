"""ONNX graphs opened on a device. `cuda` runs on CUDA or not at all; `auto` says when it had to take the CPU."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from service import bundle
from service.bundle import GraphSpec, TensorSpec
from service.errors import StartError
from service.manifest import BundleError, Manifest
from service.process import cpus
from service.settings import WantedDevice

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read while it is imported; otherwise it tells its makers of our sessions
try:
    import onnxruntime as ort
except ModuleNotFoundError as error:
    raise StartError("onnxruntime is not installed; `pip install 'capserve[cpu]'` brings it, or [gpu] with CUDA") from error

logger = logging.getLogger(__name__)

Arrays = list[NDArray[Any]]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # batch sizes that CUDA pads to
# Seconds for one row on one thread below which more threads cost more in waiting for each other than they save, and take the
# core that the event loop answers on.
QUICK = 1e-3
TRIALS = 5
DTYPES = {"float": np.float32, "int64": np.int64}


class Session(Protocol):
    nodes: Mapping[str, int]  # provider -> nodes of the graph it runs
    runners: int  # how many threads had best call run() at once

    def run(self, *inputs: NDArray[Any]) -> Arrays: ...
    def warm(self, *inputs: NDArray[Any]) -> None: ...  # runs all that a later run() of this size may need


@dataclass(frozen=True)
class Device:
    """Where graphs run; `open` gives a session whose signature has been compared with the contract."""

    provider: str
    open: Callable[[Path, GraphSpec, Manifest], Session]
    fell_back: bool = False  # to the CPU, with CUDA's package installed

    def rehearsal(self, most: int) -> list[int]:
        """Batch sizes to run before the first request, which would wait for what a first run does.

        On CUDA every size that it pads to, twice: the second run of a size records a CUDA graph. On a CPU the largest has it all.
        """
        return [most] if self.provider == CPU else sorted({min(bucket, most) for bucket in BUCKETS} | {most}) * 2


def device(wanted: WantedDevice, threads: int, cuda_memory: int, cuda_graphs: bool, probe: Path) -> Device:
    """The device asked for; `probe` is a graph that must really run there."""
    cpu = Device(CPU, lambda path, spec, manifest: on_cpu(path, spec, manifest, threads))
    if wanted == "cpu":
        return cpu
    try:
        _find_cuda()
        options = {**CUDA_OPTIONS, "gpu_mem_limit": cuda_memory << 30, "enable_cuda_graph": int(cuda_graphs)}
        _open(probe, _options(threads=1, cuda=True), [(CUDA, options)])
    except StartError as reason:
        if wanted == "cuda":
            raise
        fell_back = CUDA in ort.get_available_providers()
        logger.log(logging.WARNING if fell_back else logging.INFO, "running on the CPU: %s", reason)
        return replace(cpu, fell_back=fell_back)
    return Device(CUDA, lambda path, spec, manifest: CudaSession(path, spec, manifest, options))


def on_cpu(path: Path, spec: GraphSpec, manifest: Manifest, most: int) -> Session:
    """A graph on one thread if it is quick there, on `most` if not."""
    single = CpuSession(path, spec, manifest, threads=1)
    if most == 1 or single.seconds() < QUICK:
        return single
    return CoresSession(single, CpuSession(path, spec, manifest, most), most)


class CoresSession:
    """A slow graph on many cores: a run by itself has them all, of runs side by side each has one.

    Threads that share one run wait for each other after every node, and far longer when something else needs a core; runs
    side by side wait for nothing.
    """

    def __init__(self, single: CpuSession, joint: CpuSession, runners: int) -> None:
        self._single, self._joint = single, joint
        self._under_way = 0
        self._lock = threading.Lock()
        self.runners, self.nodes = runners, joint.nodes

    def warm(self, *inputs: NDArray[Any]) -> None:
        for session in (self._single, self._joint):
            session.run(*inputs)

    def run(self, *inputs: NDArray[Any]) -> Arrays:
        with self._lock:
            session = self._single if self._under_way else self._joint
            self._under_way += 1
        try:
            return session.run(*inputs)
        finally:
            with self._lock:
                self._under_way -= 1


class CpuSession:
    runners = 1

    def __init__(self, path: Path, spec: GraphSpec, manifest: Manifest, threads: int) -> None:
        self._session = _open(path, _options(threads, cuda=False), [CPU])
        _check(self._session, spec, manifest, path)
        self._spec, self._manifest = spec, manifest
        self._inputs = [tensor.name for tensor in spec.inputs]
        self._outputs = [tensor.name for tensor in spec.outputs]
        self.nodes = _nodes(self._session)

    def run(self, *inputs: NDArray[Any]) -> Arrays:
        outputs: Arrays = self._session.run(self._outputs, dict(zip(self._inputs, inputs, strict=True)))
        return outputs

    def warm(self, *inputs: NDArray[Any]) -> None:
        self.run(*inputs)

    def seconds(self) -> float:
        """What one row takes, at best of a few."""
        row = [
            np.zeros([axis or 1 for axis in tensor.shape(self._manifest)], DTYPES[tensor.dtype]) for tensor in self._spec.inputs
        ]
        taken = []
        for _ in range(TRIALS):
            started = time.perf_counter()
            self.run(*row)
            taken.append(time.perf_counter() - started)
        return min(taken)


# HEURISTIC: an exhaustive search costs seconds for each new shape. 0 for the copy stream is racy.
CUDA_OPTIONS: dict[str, Any] = {
    "cudnn_conv_algo_search": "HEURISTIC",
    "arena_extend_strategy": "kSameAsRequested",
    "do_copy_in_default_stream": 1,
}


class CudaSession:
    """Inputs and outputs stay at fixed places on the GPU, a set for each batch size, as CUDA graphs demand."""

    memory = "cuda"
    runners = 1

    def __init__(self, path: Path, spec: GraphSpec, manifest: Manifest, options: Mapping[str, Any]) -> None:
        self._session = _open(path, _options(threads=1, cuda=True), [(CUDA, dict(options))])
        _check(self._session, spec, manifest, path)
        self._spec, self._manifest = spec, manifest
        self._graphs = bool(options["enable_cuda_graph"])
        self._places: dict[int, _Place] = {}
        self._lock = threading.Lock()  # one binding, one user at a time
        self.nodes = _nodes(self._session)

    def warm(self, *inputs: NDArray[Any]) -> None:
        self.run(*inputs)

    def run(self, *inputs: NDArray[Any]) -> Arrays:
        most, count = BUCKETS[-1], len(inputs[0])
        parts = [self._run(*(each[first : first + most] for each in inputs)) for first in range(0, count, most)]
        return parts[0] if len(parts) == 1 else [np.concatenate(column) for column in zip(*parts, strict=True)]

    def _run(self, *inputs: NDArray[Any]) -> Arrays:
        count = len(inputs[0])
        size = next(bucket for bucket in BUCKETS if bucket >= count)
        with self._lock:
            place = self._places.get(size) or self._place(size)
            for value, array in zip(place.inputs, inputs, strict=True):
                padding = [(0, size - count)] + [(0, 0)] * (array.ndim - 1)
                value.update_inplace(np.ascontiguousarray(np.pad(array, padding)))
            self._session.run_with_iobinding(place.binding, place.options)
            return [value.numpy()[:count] for value in place.outputs]

    def _place(self, size: int) -> _Place:
        binding, options = self._session.io_binding(), ort.RunOptions()
        inputs = [self._allocate(tensor, size) for tensor in self._spec.inputs]
        outputs = [self._allocate(tensor, size) for tensor in self._spec.outputs]
        for tensor, value in zip(self._spec.inputs, inputs, strict=True):
            binding.bind_ortvalue_input(tensor.name, value)
        for tensor, value in zip(self._spec.outputs, outputs, strict=True):
            binding.bind_ortvalue_output(tensor.name, value)
        if self._graphs:
            options.add_run_config_entry("gpu_graph_id", str(size))
        place = self._places[size] = _Place(binding, options, inputs, outputs)
        return place

    def _allocate(self, tensor: TensorSpec, size: int) -> Any:
        shape = [size if axis is None else axis for axis in tensor.shape(self._manifest)]
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, DTYPES[tensor.dtype]), self.memory, 0)


@dataclass(frozen=True)
class _Place:
    binding: Any
    options: Any
    inputs: list[Any]
    outputs: list[Any]


def _options(threads: int, cuda: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors; its warnings are for whoever made the graph
    options.intra_op_num_threads = threads  # set even when it is the default: that also stops ORT from pinning threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_mem_pattern = cuda  # a plan of the memory for each batch size saves no time on a CPU, and holds its own block
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads would burn what others need
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if cuda:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    elif not cpus.multiplies_int8():
        # Sums of int8 products saturate there, and a network that tells digits apart no longer does. As written, the graph
        # multiplies in float what was rounded to int8: the same numbers as elsewhere, at the pace of float32.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


def _open(path: Path, options: Any, providers: list[Any]) -> Any:
    on_cuda = providers != [CPU]
    try:
        session = ort.InferenceSession(path, options, providers=providers, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's own classes have no common ancestor below Exception
        text = str(error).strip().splitlines()[0]
        if on_cuda:
            raise StartError(f"CUDA does not run {path.name}: {_missing() or text}") from error
        raise BundleError(f"{path}: expected a graph that ONNX Runtime {ort.__version__} opens, found: {text}") from error
    found = session.get_providers()[0]
    if on_cuda and found != CUDA:  # what is available and what is used are different questions
        raise StartError(f"CUDA did not take {path.name}, {found} did: {_missing() or 'ONNX Runtime logged why'}")
    return session


def _find_cuda() -> None:
    if CUDA not in ort.get_available_providers():
        raise StartError(
            f"onnxruntime {ort.__version__} has no {CUDA}: this is the CPU package. `pip uninstall onnxruntime`, "
            "then `pip install 'capserve[gpu]'`, or set CAPSERVE_DEVICE=cpu"
        )
    if hasattr(ort, "preload_dlls"):
        with redirect_stdout(sys.stderr):  # where it says what it did not find
            ort.preload_dlls()  # CUDA and cuDNN from NVIDIA's wheels


def _missing() -> str | None:
    """The first library that CUDA's provider needs and does not find; ONNX Runtime logs it, but does not raise it."""
    for library in ("libcuda.so.1", Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"):
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            name, _, reason = str(error).partition(": ")
            if "cannot open shared object" in reason:
                part = (
                    "the NVIDIA driver" if name == "libcuda.so.1" else "CUDA or cuDNN; `pip install 'capserve[gpu]'` brings them"
                )
                return f"{name} is missing, a part of {part}"
    return None


def _check(session: Any, spec: GraphSpec, manifest: Manifest, path: Path) -> None:
    bundle.check_signature(spec, manifest, session.get_inputs(), session.get_outputs(), path)


def _nodes(session: Any) -> Mapping[str, int]:
    if not hasattr(session, "get_provider_graph_assignment_info"):  # before 1.24
        return {}
    counts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] += len(part.get_nodes())
    return counts
