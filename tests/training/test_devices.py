"""What a process asks of its machine before it trains."""

import ctypes
import subprocess
import sys

import pytest

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
