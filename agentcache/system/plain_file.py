"""Open files of other programs or users safely."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

_OPENAT2 = 437  # on every architecture
_RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x04, 0x08


def open_plain(path: Path) -> int:
    """Open a regular file for reading, following links; return the descriptor.

    Never blocks on a pipe or opens a device: that can have side effects.

    Raises:
        OSError: the file cannot be opened.
        ValueError: not a regular file, or an invalid path.
    """
    _require_regular(os.stat(path))
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(fd))  # it may have been replaced
    except ValueError:
        os.close(fd)
        raise
    return fd


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a file")


def open_below(folder: int, path: str, flags: int) -> int | None:
    """Open a file below a folder without following links: openat2(2), Linux 5.6.

    Return a descriptor, or None on any failure.

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
