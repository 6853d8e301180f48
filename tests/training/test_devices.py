"""What a process asks of its machine before it trains."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from training import devices, torchrun
from training.errors import SettingError

FAULTS = """
import resource, torch
from training.devices import keep_memory
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

    assert faults("keep_memory()") <= faults("") / 4


def test_memory_that_does_not_suffice_is_told_with_what_to_do() -> None:
    with pytest.raises(SettingError, match="a batch of 128 does not fit into memory: lower --batch-size") as told:
        with devices.enough_memory(128):
            torch.empty(1 << 60, dtype=torch.uint8)
    assert "\n" not in str(told.value)
    with pytest.raises(RuntimeError, match="something else"), devices.enough_memory(128):
        raise RuntimeError("something else")


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed to be too few of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SettingError, match="expected a GPU for each process, found 1 for at least 2; lower --nproc-per-node"):
        with devices.place():
            pass


def test_how_many_train_together_is_a_number_if_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    assert (torchrun.several(), torchrun.world()) == (False, 1)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(SettingError, match="expected a number in WORLD_SIZE, as torchrun sets it, found 'two'"):
        torchrun.world()


@pytest.mark.parametrize(("threads", "processes", "said"), [(1, 1, "1 of 2 cores"), (1, 2, "2 cores"), (2, 1, "2 cores")])
def test_cores_that_were_left_to_others_are_told(
    threads: int, processes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert devices.hardware(torch.device("cpu"), processes).endswith(f", {said}")
