"""Opens ONNX graphs on a device. `cuda` runs on CUDA or not at all; `auto` logs when it has to use the CPU."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import cuda, runtime
from service.bundle import DTYPES, ENCODER, GraphSpec
from service.errors import StartError
from service.manifest import BundleError, Manifest
from service.process import cpus
from service.runtime import CPU, CUDA, Arrays, Session, ort
from service.settings import WantedDevice

logger = logging.getLogger(__name__)

# Seconds of CPU time for one row below which more threads cost more by waiting for each other than they save, and take the core
# that the event loop runs on.
QUICK = 1.1e-3
TRIAL_SECONDS, TRIAL_RUNS = 0.03, 4  # measuring it takes at least these: the first run is slow, as is a core that others use

# Rows of a batch per run of an encoder. Votes are laid out input capsule by input capsule, pictures side by side within each:
# with 16 pictures each one's are a multiple of 2 KiB apart, share few sets of the L1 cache, and evict each other.
PIECE = 9
SMALLEST_PIECE = 3  # rows; fewer are slower by themselves than beside others


@dataclass(frozen=True)
class Device:
    """Where graphs run; `open` returns a session whose signature has been checked against the contract."""

    provider: str
    open: Callable[[Path, GraphSpec, Manifest], Session]
    fell_back: bool = False  # to the CPU, although CUDA's package is installed

    def warm_up_sizes(self, most: int) -> list[int]:
        """Batch sizes to run before the first request, which would otherwise wait for what a first run does.

        On CUDA every size that it pads to, twice: the second run of a size records a CUDA graph, if it can. It serves this thread
        only; a runner records its own at its first runs of each size. On a CPU the second run takes as long as the first.
        """
        return [1] if self.provider == CPU else sorted({min(bucket, most) for bucket in cuda.BUCKETS} | {most}) * 2


def device(wanted: WantedDevice, threads: int, cuda_memory: int, cuda_graphs: bool, probe: Path) -> Device:
    """The device asked for; `probe` is a graph that must really open there."""
    cpu = Device(CPU, lambda path, spec, manifest: open_on_cpu(path, spec, manifest, threads))
    if wanted == "cpu":
        return cpu
    try:
        cuda.load_libraries()
        cuda_settings = cuda.settings(cuda_memory, cuda_graphs)
        with cuda.lock:
            cuda.open_session(probe, cuda_settings)  # and dropped at once
    except StartError as reason:
        if wanted == "cuda":
            raise
        fell_back = CUDA in ort.get_available_providers()
        why = reason if fell_back or cuda.has_driver() else "there is no NVIDIA driver here"
        logger.log(logging.WARNING if fell_back else logging.INFO, "running on the CPU: %s", why)
        return replace(cpu, fell_back=fell_back)
    return Device(CUDA, lambda path, spec, manifest: cuda.CudaSession(path, spec, manifest, cuda_settings))


def open_on_cpu(path: Path, spec: GraphSpec, manifest: Manifest, most: int) -> Session:
    """Opens a graph on one thread if it is quick there, otherwise on `most`."""
    single = CpuSession(path, spec, manifest, threads=1)
    if most == 1 or single.is_quick():
        return single
    return CoresSession(single, CpuSession(path, spec, manifest, most), most)


class CoresSession:
    """A slow graph on many cores: a run that begins alone uses all of them, one that begins beside others uses one.

    Threads that share one run wait for each other after every node, and far longer when something else needs a core; concurrent
    runs of one thread each wait for nothing.
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


class CpuSession(Session):
    def __init__(self, path: Path, spec: GraphSpec, manifest: Manifest, threads: int) -> None:
        self._session = _open(path, threads)
        runtime.check(self._session, spec, manifest, path)
        self._spec, self._manifest = spec, manifest
        self._inputs = [tensor.name for tensor in spec.inputs]
        self._outputs = [tensor.name for tensor in spec.outputs]
        self.nodes = runtime.nodes(self._session)

    def run(self, *inputs: NDArray[Any]) -> Arrays:
        cuts = pieces(len(inputs[0])) if self._spec is ENCODER else []
        if len(cuts) < 2:
            return self._run(inputs)
        outputs = [self._run([each[cut] for each in inputs]) for cut in cuts]
        return [np.concatenate(rows) for rows in zip(*outputs, strict=True)]

    def _run(self, inputs: Sequence[NDArray[Any]]) -> Arrays:
        outputs: Arrays = self._session.run(self._outputs, dict(zip(self._inputs, inputs, strict=True)))
        return outputs

    def is_quick(self) -> bool:
        """Whether some run of one row takes this thread less than QUICK seconds of CPU time; waiting does not count."""
        row = [
            np.zeros([axis or 1 for axis in tensor.shape(self._manifest)], DTYPES[tensor.dtype]) for tensor in self._spec.inputs
        ]
        ends, runs = time.perf_counter() + TRIAL_SECONDS, 0
        while runs < TRIAL_RUNS or time.perf_counter() < ends:
            before = time.thread_time()
            self.run(*row)
            if time.thread_time() - before < QUICK:
                return True
            runs += 1
        return False


def pieces(rows: int) -> list[slice]:
    """Cuts rows into pieces that run together: of PIECE rows, but the last is never below SMALLEST_PIECE if there are several."""
    starts = list(range(0, max(1, rows - SMALLEST_PIECE + 1), PIECE))
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], rows], strict=True)]


def _options(threads: int) -> Any:
    options = runtime.options(threads)
    options.enable_mem_pattern = False  # a memory plan for each batch size saves no time here, and each holds its own block
    sum_exactly(options)
    return options


def sum_exactly(options: Any) -> None:
    """Where sums of int8 products would saturate and ruin the answers, chooses kernels that widen first.

    These give the same numbers as elsewhere. They are slower, so they are not used where nothing saturates.
    """
    if not cpus.has_dot_products():
        options.add_session_config_entry("session.x64quantprecision", "1")


def _open(path: Path, threads: int) -> Any:
    try:
        return ort.InferenceSession(path, _options(threads), providers=[CPU], enable_fallback=0)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class below Exception
        first = str(error).strip().partition("\n")[0]
        raise BundleError(f"{path}: expected a graph that ONNX Runtime {ort.__version__} opens, found: {first}") from error
