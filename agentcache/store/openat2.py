"""A file below a folder in one call: on Linux the kernel itself can refuse links on the way (openat2(2), since 5.6)."""

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
    """A descriptor of what is there; None where this way does not lead to it, for whatever reason.

    Args:
        path: of the file, from the folder on.
        flags: as for `os.open`, of an open that makes no file.
    """
    if sys.platform != "linux":
        return None
    how = _how(flags)
    fd = _syscall()(_OPENAT2, folder, os.fsencode(path), how, len(how))
    return fd if fd >= 0 else None


@cache
def _how(flags: int) -> bytes:
    """`struct open_how`."""
    return struct.pack("=QQQ", flags, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)


@cache
def _syscall() -> Callable[[int, int, bytes, bytes, int], int]:
    syscall = ctypes.CDLL(None).syscall
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    syscall.restype = ctypes.c_long
    return syscall
