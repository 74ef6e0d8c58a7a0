"""Read files from untrusted sources."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from agentcache.errors import UnreadableAdapter, UnsupportedAdapter
from agentcache.system.files import open_plain


@contextmanager
def open_plain_file(path: Path, max_bytes: int) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file, also through a link (as in the hub's cache), with its size; never a device or a pipe.

    Raises:
        UnreadableAdapter: missing, no file, or unreadable, also within the context.
        UnsupportedAdapter: larger than `max_bytes`.
    """
    try:
        with open(_open(path), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise UnsupportedAdapter(f"{path.name} is larger than {max_bytes} bytes")
            yield stream, size
    except OSError as error:
        raise UnreadableAdapter(f"{path.name} cannot be read: {error.strerror}") from None


def _open(path: Path) -> int:
    try:
        return open_plain(path)
    except ValueError:
        raise UnreadableAdapter(f"{path.name} is not a file") from None


def read_plain_file(path: Path, max_bytes: int) -> bytes:
    """All bytes of such a file; raises the same."""
    with open_plain_file(path, max_bytes) as (stream, size):
        return read_exactly(stream, size, path.name)


def read_exactly(stream: BinaryIO, size: int, name: str) -> bytes:
    """The next `size` bytes; raises UnreadableAdapter if there are fewer."""
    data = stream.read(size)
    if len(data) < size:
        raise UnreadableAdapter(f"{name} is being changed")
    return data
