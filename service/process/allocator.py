"""glibc settings that return the memory of a large picture to the system once the picture is gone.

glibc raises its threshold for separate mappings to the largest block it has seen freed, up to 32 MiB: after a few photographs
each thread's heap keeps hundreds of megabytes. A fixed threshold keeps resident memory constant. Each heap may keep as much free
memory at its end as finding a digit in a picture needs: when it was returned after each picture, getting it back for the next
took a tenth of the time.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGE, KEPT = 1 << 20, 8 << 20  # bytes


def return_large_blocks(large: int = LARGE, kept: int = KEPT) -> None:
    """Set the thresholds if the C library is glibc; others do not hoard memory."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, large)
        mallopt(M_TRIM_THRESHOLD, kept)
