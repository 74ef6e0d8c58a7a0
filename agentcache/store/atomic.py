"""Files that are there whole or not at all: the store's way to the disk.

A file is written under a temporary name in its own folder, synced, renamed into place, and the folder is synced. Of a
turn only the last of these syncs, that of the manifest's folder, flushes the drive: it covers those before it.
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
    """Turn an error of the operating system into a StoreError that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {action}: {error}{whose(error)}") from error


def write_all(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    """Write all of `parts`, one after the other, from `offset` on."""
    os.lseek(fd, offset, os.SEEK_SET)
    views = [memoryview(part) for part in parts if len(part)]
    while views:
        views = skip_bytes(views, os.writev(fd, views[:MOST_PARTS]))


class Replacement:
    """A new content of `path` on its way to the disk: write, replace; then the folder has to be synced."""

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
            # Here, where errors of writing it are reported: another descriptor may not hear of them.
            self._files.sync(fd, covered=True)

    def replace(self) -> None:
        self._fault(f"{self._kind}-before-replace")
        self._files.rename(self._temp, self.path)
        self._is_temporary = False
        self._fault(f"{self._kind}-replaced")

    def discard(self) -> None:
        """Remove the temporary file, if it is still there."""
        if self._is_temporary:
            with suppress(OSError):
                self._files.remove(self._temp)


def replace_file(files: CacheFiles, path: Path, data: bytes, kind: str, fault: Fault, *, covered: bool = False) -> None:
    """Give `path` the content `data`; durable on return, and never half there.

    Args:
        covered: whether a later sync has the new content kept (`durable.sync`).

    Raises:
        OSError: the disk is full, say. Before the rename nothing has changed; after it the new content is there whole.
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
    """Write `data` at `offset` and cut off what was behind it; durable on return.

    Args:
        covered: whether a later sync has the new content kept (`durable.sync`).

    Raises:
        OSError: the disk is full, say; the first `offset` bytes are untouched then.
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
