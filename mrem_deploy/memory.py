"""How the C library hands out large blocks of memory.

Training allocates the same large tensors every step. By default glibc fetches each block above a
threshold from the kernel and gives it back at once, so that every step pays for new, zeroed pages.
"""

from __future__ import annotations

import ctypes
import sys

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

LARGEST_INT = 2**31 - 1
MMAP_THRESHOLDS = (2**30, 2**25)  # bytes; before glibc 2.35, 32 MiB is the most it accepts


def keep_large_blocks() -> bool:
    """Keep freed blocks for the next step instead of returning them to the system; False: not glibc.

    The process then stays at its peak resident size, which is what it needs in the next step anyway.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    trimmed = mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
    return bool(trimmed and any(mallopt(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS))
