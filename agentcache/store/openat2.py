"""Open a file below a folder without following links: openat2(2), Linux 5.6."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from functools import cache

_OPENAT2 = 437  # on every architecture
_RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x04, 0x08


def open_below(folder: int, path: str, flags: int) -> int | None:
    """Open a file; return a descriptor, or None on any failure.

    Args:
        path: relative to `folder`.
        flags: of `os.open`, without O_CREAT.
    """
    if sys.platform != "linux":
        return None
    how = _how(flags)
    fd = _syscall()(_OPENAT2, folder, os.fsencode(path), how, len(how))
    return fd if fd >= 0 else None


@cache
def _how(flags: int) -> bytes:
    return struct.pack("=QQQ", flags, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)


@cache
def _syscall() -> Callable[[int, int, bytes, bytes, int], int]:
    syscall = ctypes.CDLL(None).syscall
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    syscall.restype = ctypes.c_long
    return syscall
