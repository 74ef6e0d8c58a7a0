"""Where arrays lie, and the pages that the system gives memory in."""

from __future__ import annotations

import ctypes
import mmap

import mlx.core as mx


def address_of(array: mx.array) -> int:
    """Where it lies, in memory that this process sees; not of an array without bytes."""
    # NumPy would make memory of its own for an array that has none.
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(array).cast("B")))


def to_page_end(num_bytes: int) -> int:
    """The least number of whole pages' bytes that is not less."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
