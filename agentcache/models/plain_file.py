"""Reading files that somebody else has written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from agentcache.errors import UnsupportedAdapter


@contextmanager
def open_plain_file(path: Path, max_bytes: int) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file, or one that a link leads to (as in the hub's cache), and its size; never a device or a pipe.

    Raises:
        UnsupportedAdapter: it is not there, is something else than a file, or is larger than `max_bytes`; inside, it
            cannot be read.
    """
    try:
        # Looked at before it is opened, which does things to some devices; and opened without waiting for a pipe's end.
        _check(path, os.stat(path), max_bytes)
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            status = os.fstat(stream.fileno())
            _check(path, status, max_bytes)
            yield stream, status.st_size
    except OSError as error:
        raise UnsupportedAdapter(f"{path.name} cannot be read: {error.strerror}") from None


def _check(path: Path, status: os.stat_result, max_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedAdapter(f"{path.name} is not a file")
    if status.st_size > max_bytes:
        raise UnsupportedAdapter(f"{path.name} is larger than {max_bytes} bytes")


def read_plain_file(path: Path, max_bytes: int) -> bytes:
    """All of such a file; raises the same."""
    with open_plain_file(path, max_bytes) as (stream, size):
        return read_exactly(stream, size, path.name)


def read_exactly(stream: BinaryIO, size: int, name: str) -> bytes:
    """The next `size` bytes; raises UnsupportedAdapter where there are fewer."""
    data = stream.read(size)
    if len(data) < size:
        raise UnsupportedAdapter(f"{name} is being changed")
    return data
