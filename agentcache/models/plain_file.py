"""Reading files that somebody else has written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from agentcache.errors import UnsupportedAdapter


def read_plain_file(path: Path, max_bytes: int) -> bytes:
    """All of a regular file, or of one that a link leads to (as in the hub's cache); never a device or a pipe.

    Raises:
        UnsupportedAdapter: it is not there, is something else than a file, or is larger than `max_bytes`.
    """
    try:
        # Without waiting: opening a pipe would, until somebody writes into it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnsupportedAdapter(f"{path.name} is not a file")
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise UnsupportedAdapter(f"{path.name} cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise UnsupportedAdapter(f"{path.name} is larger than {max_bytes} bytes")
    return data
