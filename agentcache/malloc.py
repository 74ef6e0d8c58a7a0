"""The C library's allocator keeps freed memory, which suits steps but not a single large request."""

from __future__ import annotations

import sys

TOP_PAD = (64 << 20) + (1 << 16)  # bytes of address space requested in advance; more than one of glibc's heaps


def give_back_freed() -> None:
    """Return free memory to the system, if the C library supports it."""
    if sys.platform == "linux":
        import ctypes  # imported only on need

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
