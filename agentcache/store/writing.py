"""Atomic, durable writes to the cache folder: temporary file, sync, rename, sync of the folder.

A turn flushes the drive once: its last sync, of the manifest's folder, covers the earlier ones.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentcache.errors import CacheFolderInUse, StoreError
from agentcache.store.cache_files import MOST_PARTS, CacheFiles, skip_bytes, whose
from agentcache.system.threads import start_thread

T = TypeVar("T")

log = logging.getLogger("agentcache.writer")

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
    """An atomic replacement of `path`: call `write`, `replace`, then sync the folder."""

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
    """Replace `path` atomically, durable at once or, if `covered`, after a later sync.

    After an OSError it has its old or new content, complete.
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
    """Replace what follows `offset` by `data`. `covered` as in `replace_file`.

    After an OSError the first `offset` bytes are unchanged.
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


class FolderLock:
    """Locks a cache folder until `release` or process exit. Raises CacheFolderInUse, StoreError."""

    def __init__(self, files: CacheFiles) -> None:
        cache_dir = files.root
        self._files = files
        self._path = cache_dir / "lock"
        try:
            with self._files.open(self._path, os.O_RDWR | os.O_CREAT) as fd:
                self._fd: int | None = os.dup(fd)
        except OSError as error:
            raise StoreError(f"cannot open the lock of {cache_dir}: {error}{whose(error)}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = _holder(self._fd)
            self.release()
            message = f"the cache folder {cache_dir} is in use by {holder}: stop it or choose another cache folder"
            raise CacheFolderInUse(message) from None
        except OSError as error:
            self.release()
            raise StoreError(f"cannot lock {cache_dir}: {error}") from error

    def is_in_place(self) -> bool:
        assert self._fd is not None
        try:
            return os.path.samestat(os.fstat(self._fd), self._files.status(self._path))
        except FileNotFoundError:
            return False

    def renew(self) -> None:
        """Lock a folder that has replaced the locked one. Raises StoreError."""
        try:
            new = FolderLock(self._files)
        except CacheFolderInUse as error:
            raise StoreError(str(error)) from error
        self.release()
        self._fd = new._fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _holder(fd: int) -> str:
    pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
    return f"process {pid}" if pid.isdigit() else "another process"


@dataclass(frozen=True)
class _Job(Generic[T]):
    run: Callable[[], T]
    done: Callable[[T | StoreError], None]
    num_bytes: int

    def finish(self) -> None:
        self.tell(_outcome(self.run))

    def tell(self, outcome: T | StoreError) -> None:
        try:
            self.done(outcome)
        except BaseException:
            log.exception("the callback of a write has failed")


class Writer:
    """Runs jobs in order on one thread, so that a manifest never precedes its blocks."""

    def __init__(self, max_bytes: int = 512 << 20) -> None:
        self._max_bytes = max_bytes
        self._jobs: deque[_Job[Any]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._ended = False
        self._thread = start_thread("agentcache-writer", self._loop, self._died)

    def submit(self, run: Callable[[], T], done: Callable[[T | StoreError], None], num_bytes: int = 0) -> None:
        """Queue `run`; block while jobs have over `max_bytes`. `done` gets its result or error on the writer thread.

        After `close`, `done` gets an error at once.
        """
        if not self._queue(_Job(run, done, num_bytes)):
            done(StoreError("the writer is closed"))

    def _queue(self, job: _Job[Any]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes <= self._max_bytes or self._ended)
            if self._ended:
                return False
            self._jobs.append(job)
            self._waiting_bytes += job.num_bytes
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """Finish queued jobs, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            job.finish()
            with self._changed:
                self._waiting_bytes -= job.num_bytes
                self._changed.notify_all()

    def _died(self, error: Exception) -> None:
        with self._changed:
            self._ended = True
            jobs, self._jobs = self._jobs, deque()
            self._changed.notify_all()
        for job in jobs:
            job.tell(StoreError(f"the writer has failed: {error}"))

    def _next(self) -> _Job[Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._closing)
            self._ended = not self._jobs
            return None if self._ended else self._jobs.popleft()


def _outcome(run: Callable[[], T]) -> T | StoreError:
    try:
        return run()
    except StoreError as error:
        return error
    except BaseException as error:  # none may end the thread
        log.exception("a write has failed")
        return StoreError(f"{type(error).__name__}: {error}")
