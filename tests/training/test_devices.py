"""What a process asks of its machine before it trains."""

import ctypes
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from training import devices, torchrun
from training.errors import SettingError

FAULTS = """
import resource, torch
from training.devices import keep_freed_memory
{first}
picture = torch.ones(4096, 4096)  # 64 MiB
for steps in (16, 4):  # the first find their places
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for step in range(steps):
        picture.clone()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc can be asked to keep memory"
)
def test_freed_tensors_are_used_again_without_new_pages() -> None:
    def faults(first: str) -> int:
        code = FAULTS.format(first=first)
        return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)

    assert faults("keep_freed_memory()") <= faults("") / 4


def test_running_out_of_memory_suggests_a_smaller_batch() -> None:
    with pytest.raises(SettingError, match="a batch of 128 does not fit into memory: lower --batch-size") as told:
        with devices.explain_lack_of_memory(128):
            torch.empty(1 << 60, dtype=torch.uint8)
    assert "\n" not in str(told.value)
    with pytest.raises(RuntimeError, match="something else"), devices.explain_lack_of_memory(128):
        raise RuntimeError("something else")


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself needs no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SettingError, match="expected a GPU for each process, found 1 for at least 2; lower --nproc-per-node"):
        with devices.place():
            pass


def test_world_size_must_be_a_number_if_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    assert (torchrun.several(), torchrun.world()) == (False, 1)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(SettingError, match="expected a number in WORLD_SIZE, as torchrun sets it, found 'two'"):
        torchrun.world()


@pytest.mark.parametrize(("threads", "processes", "said"), [(1, 1, "1 of 2 cores"), (1, 2, "2 cores"), (2, 1, "2 cores")])
def test_hardware_names_the_number_of_cores_used(
    threads: int, processes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert devices.hardware(torch.device("cpu"), processes).endswith(f", {said}")


def test_running_out_of_gpu_memory_suggests_a_smaller_batch() -> None:
    with pytest.raises(SettingError, match="a batch of 128 does not fit into memory: lower --batch-size"):
        with devices.explain_lack_of_memory(128):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with devices.place() as place:
        assert chosen == [place.device] == [torch.device("cuda", 1)]


def test_world_size_without_torchrun_is_rejected_with_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as in a Slurm job
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(SettingError, match="WORLD_SIZE is 2, but .*; start it with torchrun, or unset WORLD_SIZE"),
        devices.place(),
    ):
        pass


def test_hardware_names_the_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    told = [devices.hardware(torch.device("cuda", 0), processes) for processes in (1, 8)]
    assert told == ["NVIDIA H200", "8 x NVIDIA H200"]


def test_software_names_the_versions_of_captrain_and_torch() -> None:
    assert devices.software() == f"captrain {version('capserve')}, torch {torch.__version__}"


@pytest.mark.parametrize(("native", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_precision_is_bf16_only_where_it_is_native(native: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_multiplies_bf16", lambda _: native)
    assert devices.precision("auto", torch.device("cpu")) == chosen
