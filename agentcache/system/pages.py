"""Reserve addresses, allocate memory pages and free them. Linux only, except `to_page_end`."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

# madvise(2)
_MADV_DONTNEED, _MADV_NOHUGEPAGE, _MADV_POPULATE_WRITE = 4, 15, 23


@cache
def addresses_are_free() -> bool:
    """Whether reserving addresses costs nothing: on Linux, without resource limits or strict overcommit."""
    if sys.platform != "linux":
        return False
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return False
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return False


def to_page_end(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def keep_pages_small(begin: int, end: int) -> None:
    """Allocate single pages between two addresses, not huge pages of 2 MB."""
    first, last = pages_within(begin, end)
    _madvise()(first, last - first, _MADV_NOHUGEPAGE)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def take_pages(begin: int, num_bytes: int) -> bool:
    """Zero the bytes and free whole pages; False if the system refuses."""
    end = begin + num_bytes
    first, last = pages_within(begin, end)
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(last, 0, end - last)
    return first == last or _madvise()(first, last - first, _MADV_DONTNEED) == 0


def pages_within(begin: int, end: int) -> tuple[int, int]:
    """Begin and end of the whole pages between two addresses; both `end` without any."""
    first, last = to_page_end(begin), end // mmap.PAGESIZE * mmap.PAGESIZE
    return (first, last) if first < last else (end, end)


def populate_pages(begin: int, num_bytes: int) -> None:
    """Allocate the pages of these bytes now, keeping contents. Linux before 5.14 allocates them on write."""
    first, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + num_bytes
    _madvise()(first, end - first, _MADV_POPULATE_WRITE)
