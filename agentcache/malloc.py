"""The C library's allocator, which keeps what is freed: best for an engine's steps, not for a single large request."""

from __future__ import annotations

import sys

TOP_PAD = (64 << 20) + (1 << 16)  # bytes of address space asked for beyond what is needed: more than a heap of glibc's


def give_back_freed() -> None:
    """Give the memory that is free back to the system, where the C library can."""
    if sys.platform == "linux":
        import ctypes  # not for whoever never has anything large

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
