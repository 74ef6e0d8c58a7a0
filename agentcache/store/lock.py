"""One process per cache folder."""

from __future__ import annotations

import fcntl
import os

from agentcache.errors import CacheFolderInUse, StoreError
from agentcache.store.cache_files import CacheFiles, whose


class FolderLock:
    """An exclusive lock on a cache folder, until `release` or the process ends.

    Raises CacheFolderInUse, which names the process, and StoreError.
    """

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
        """Whether the path has the locked file; False after the folder was removed."""
        assert self._fd is not None
        try:
            return os.path.samestat(os.fstat(self._fd), self._files.status(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _holder(fd: int) -> str:
    pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
    return f"process {pid}" if pid.isdigit() else "another process"
