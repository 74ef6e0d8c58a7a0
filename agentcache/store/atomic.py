"""Atomic, durable file writes: temporary file, sync, rename, sync of the folder.

A turn flushes the drive once, with the last sync, of the manifest's folder; that covers the earlier ones.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agentcache.errors import StoreError
from agentcache.store.cache_files import MOST_PARTS, CacheFiles, skip_bytes, whose

TEMP_SUFFIX = ".tmp"

Fault = Callable[[str], None]
"""Called with the name of each step of the write path; tests let it raise or kill the process."""


@contextmanager
def as_store_error(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {action}: {error}{whose(error)}") from error


def write_all(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    os.lseek(fd, offset, os.SEEK_SET)
    views = [memoryview(part) for part in parts if len(part)]
    while views:
        views = skip_bytes(views, os.writev(fd, views[:MOST_PARTS]))


class Replacement:
    """An atomic replacement of `path`: `write`, `replace`, then the caller syncs the folder."""

    def __init__(self, files: CacheFiles, path: Path, kind: str, fault: Fault) -> None:
        self.path = path
        self._files = files
        self._temp = path.with_name(f"{path.name}.{secrets.token_hex(6)}{TEMP_SUFFIX}")
        self._kind = kind
        self._fault = fault
        self._is_temporary = False

    def write(self, *parts: bytes | memoryview) -> None:
        self._fault(f"{self._kind}-before-temp")
        self._is_temporary = True
        with self._files.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            write_all(fd, parts, 0)
            self._fault(f"{self._kind}-temp-written")
            self._fault(f"{self._kind}-before-fsync")
            # Another descriptor may not get this one's write errors.
            self._files.sync(fd, covered=True)

    def replace(self) -> None:
        self._fault(f"{self._kind}-before-replace")
        self._files.rename(self._temp, self.path)
        self._is_temporary = False
        self._fault(f"{self._kind}-replaced")

    def discard(self) -> None:
        if self._is_temporary:
            with suppress(OSError):
                self._files.remove(self._temp)


def replace_file(files: CacheFiles, path: Path, data: bytes, kind: str, fault: Fault, *, covered: bool = False) -> None:
    """Replace the content of `path` atomically and durably.

    Args:
        covered: whether a later sync makes it durable (`durable.sync`).

    Raises:
        OSError: `path` has the old or the new content, complete.
    """
    replacement = Replacement(files, path, kind, fault)
    try:
        replacement.write(data)
        replacement.replace()
    finally:
        replacement.discard()
    fault(f"{kind}-before-folder-fsync")
    files.sync_folder(path.parent, covered=covered)


def append_file(
    files: CacheFiles, path: Path, data: bytes, offset: int, kind: str, fault: Fault, *, covered: bool = True
) -> None:
    """Write `data` durably at `offset` and truncate behind it.

    Args:
        covered: as in `replace_file`.

    Raises:
        OSError: the first `offset` bytes are unchanged.
    """
    with files.open(path, os.O_WRONLY) as fd:
        try:
            fault(f"{kind}-before-append")
            os.ftruncate(fd, offset)
            write_all(fd, [data], offset)
            fault(f"{kind}-appended")
            files.sync(fd, covered=covered)
            fault(f"{kind}-synced")
        except BaseException:
            with suppress(OSError):
                os.ftruncate(fd, offset)
            raise
