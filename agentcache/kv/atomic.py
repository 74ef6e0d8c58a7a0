"""Files that are there whole or not at all: the store's way to the disk.

A file is written under a temporary name in its own folder, flushed, renamed into place, and the folder is flushed.
Nothing here follows a symbolic link. Files are 0600, folders 0700, whatever the umask.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentcache.errors import StoreError

TEMP_SUFFIX = ".tmp"

Fault = Callable[[str], None]
"""Called with the name of each step of the write path; tests let it raise or kill the process."""


@contextmanager
def as_store_error(action: str) -> Iterator[None]:
    """Turn an error of the operating system into a StoreError that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {action}: {error}") from error


def make_folder(path: Path) -> None:
    """Make sure that `path` is a folder of ours, not a link to one; a new one is durable on return."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
        sync_folder(path.parent)
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(f"{path} is not a folder, or a link to one")
    if stat.S_IMODE(mode) != 0o700:
        os.chmod(path, 0o700)


def sync_folder(path: Path) -> None:
    """Make renames and removals in the folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_file(path: Path, max_bytes: int) -> bytes:
    """The whole content of a regular file.

    Raises:
        OSError: it cannot be read, it is a link or not a regular file, or it is longer than `max_bytes`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not stat.S_ISDIR(os.lstat(path.parent).st_mode):
            raise OSError("it is not a regular file, or its folder is a link")
        if status.st_size > max_bytes:
            raise OSError(f"it has {status.st_size} bytes, at most {max_bytes} make sense")
        return _read_all(fd, status.st_size)
    finally:
        os.close(fd)


def _read_all(fd: int, size: int) -> bytes:
    data = os.read(fd, size)
    while 0 < len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


class Replacement:
    """A new content of `path` on its way to the disk: write, sync, replace; then the folder has to be synced."""

    def __init__(self, path: Path, kind: str, fault: Fault) -> None:
        self.path = path
        self._temp = path.with_name(f"{path.name}.{secrets.token_hex(6)}{TEMP_SUFFIX}")
        self._kind = kind
        self._fault = fault

    def write(self, data: bytes) -> None:
        self._fault(f"{self._kind}-before-temp")
        fd = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            write_all(fd, data, 0)
        finally:
            os.close(fd)
        self._fault(f"{self._kind}-temp-written")

    def sync(self) -> None:
        self._fault(f"{self._kind}-before-fsync")
        fd = os.open(self._temp, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def replace(self) -> None:
        self._fault(f"{self._kind}-before-replace")
        os.replace(self._temp, self.path)
        self._fault(f"{self._kind}-replaced")

    def discard(self) -> None:
        """Remove the temporary file, if it is still there."""
        with suppress(OSError):
            os.unlink(self._temp)


def replace_file(path: Path, data: bytes, kind: str, fault: Fault) -> None:
    """Give `path` the content `data`; durable on return, and never half there.

    Raises:
        OSError: the disk is full, say. Before the rename nothing has changed; after it the new content is there whole.
    """
    replacement = Replacement(path, kind, fault)
    try:
        replacement.write(data)
        replacement.sync()
        replacement.replace()
    finally:
        replacement.discard()
    fault(f"{kind}-before-folder-fsync")
    sync_folder(path.parent)


def append_file(path: Path, data: bytes, offset: int, kind: str, fault: Fault) -> None:
    """Write `data` at `offset` and cut off what was behind it; durable on return.

    Raises:
        OSError: the disk is full, say; the first `offset` bytes are untouched then.
    """
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fault(f"{kind}-before-append")
        os.ftruncate(fd, offset)
        write_all(fd, data, offset)
        fault(f"{kind}-appended")
        os.fsync(fd)
        fault(f"{kind}-synced")
    except BaseException:
        with suppress(OSError):
            os.ftruncate(fd, offset)
        raise
    finally:
        os.close(fd)
