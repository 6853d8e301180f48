"""Where training runs: the device, its precision, and the processes that share the work (torchrun)."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from training import torchrun
from training.errors import SettingError, UnknownNameError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


@dataclass(frozen=True)
class Place:
    """One process's place among those that train together; alone it is rank 0 of 1."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether any process raised the flag, so that all act on it at the same step."""
        if self.world == 1:
            return flag
        raised = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return bool(raised)

    def total(self, sums: torch.Tensor) -> list[float]:
        """Add up the sums of all processes; every process gets the totals."""
        if self.world > 1:
            sums = sums.clone()
            dist.all_reduce(sums)
        values: list[float] = sums.tolist()
        return values

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextmanager
def place() -> Iterator[Place]:
    """Yield this process's place, which torchrun sets in the environment."""
    world, local = torchrun.world(), torchrun.local_rank()
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise SettingError(
                f"expected a GPU for each process, found {torch.cuda.device_count()} for at least {local + 1}; "
                "lower --nproc-per-node"
            )
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if world == 1:
        yield Place(device)
        return
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except ValueError as error:  # no address to meet the other processes at
        raise SettingError(f"WORLD_SIZE is {world}, but {error}; start it with torchrun, or unset WORLD_SIZE") from error
    try:
        yield Place(device, dist.get_rank(), world)
    finally:
        dist.destroy_process_group()


@contextmanager
def explain_lack_of_memory(batch_size: int) -> Iterator[None]:
    """Turn torch's out-of-memory errors into one that says what to do."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU; on a CPU only the text tells
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            first = str(error).partition("\n")[0]
            raise SettingError(f"a batch of {batch_size} does not fit into memory: lower --batch-size ({first})") from error
        raise


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def precision(name: str, device: torch.device) -> str:
    """Return a key of DTYPES; `auto` is bf16 where the processor multiplies it natively.

    bf16 trains `paper` in less than half the time there (benchmarks/training_step.py).
    """
    if name == "auto":
        return "bf16" if _multiplies_bf16(device) else "fp32"
    if name not in DTYPES:
        raise UnknownNameError("precision", name, ["auto", *DTYPES])
    return name


def can_compile() -> bool:
    """Whether torch.compile has the C compiler that it needs for its kernels."""
    return any(shutil.which(each) for each in (os.environ.get("CC") or "cc", "gcc", "clang"))


def hardware(device: torch.device, processes: int = 1) -> str:
    """The hardware that a bundle names; processes without GPUs share one machine, and may leave some cores to others."""
    if device.type == "cuda":
        return f"{processes} x " * (processes > 1) + torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads() * processes
    used = f"{threads} of {cores}" if threads < cores else f"{cores}"
    return f"{_processor()}, {used} cores"


def software() -> str:
    """The versions that a bundle names: another torch may give other results from the same seed."""
    return f"captrain {version('capserve')}, torch {torch.__version__}"


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, else it returns large blocks at once and each step waits for zeroed pages again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None  # other C libraries lack it
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
