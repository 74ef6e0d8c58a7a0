"""glibc's allocator keeps freed memory, which suits steps but not a single large request."""

from __future__ import annotations

import sys

# Confined children import this module and must start quickly, so ctypes is imported on need.
TOP_PAD = (64 << 20) + (1 << 16)  # bytes of address space requested in advance; more than one of glibc's heaps

# glibc's names; see mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_M_ARENA_MAX = -8
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next step, instead of returning it and faulting it in again. glibc only.

    Call it before starting threads. All later threads share one arena: memory at the end of other arenas cannot be
    returned. Existing threads have arenas of their own, which later ones may share: 64 MB heaps, returned despite the
    threshold unless the pad is as large.
    """
    import ctypes

    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_TOP_PAD, TOP_PAD)
        mallopt(_M_ARENA_MAX, 1)


def give_back_freed() -> None:
    """Return free memory to the system, if the C library supports it."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
