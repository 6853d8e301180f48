"""Memory of a large picture goes back to the system when the picture is gone.

glibc raises its threshold for separate mappings to the largest block it has seen freed, up to 32 MiB: after a few photographs
each thread's heap keeps hundreds of megabytes. A fixed threshold keeps resident memory where it was. What a heap keeps at its end
is what it takes to find a digit in a picture: given back after each, it took a tenth of the time to get it again for the next.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGE, KEPT = 1 << 20, 8 << 20  # bytes


def return_large_blocks(large: int = LARGE, kept: int = KEPT) -> None:
    """Where the C library is glibc; others do not hoard."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, large)
        mallopt(M_TRIM_THRESHOLD, kept)
