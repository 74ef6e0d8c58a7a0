"""Files that other programs or users have written, opened without surprises."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_plain(path: Path) -> int:
    """Open a regular file, or the one that a link leads to, for reading; returns the descriptor.

    It never waits for the other end of a pipe, and never opens a device, which does things to some of them.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no regular file, or the path cannot name a file.
    """
    _require_regular(os.stat(path))
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(fd))  # another file may have taken its place
    except ValueError:
        os.close(fd)
        raise
    return fd


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a file")
