"""Open files of other programs or users safely."""

from __future__ import annotations

import os
import stat
from pathlib import Path


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
