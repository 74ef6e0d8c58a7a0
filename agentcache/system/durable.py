"""Sync files and folders to the drive.

On Linux, `fsync` flushes the drive's cache. On macOS only F_FULLFSYNC does, slowly; F_BARRIERFSYNC orders writes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import sys
from enum import StrEnum
from functools import cache
from pathlib import Path

log = logging.getLogger("agentcache.store")

IS_MAC = sys.platform == "darwin"

# Darwin's <sys/fcntl.h>; not every Python names both.
_F_FULLFSYNC, _F_BARRIERFSYNC = 51, 85
# A file system's refusals of a kind of sync (exFAT, SMB).
_REFUSALS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS}


class Durability(StrEnum):
    """What a saved turn survives on macOS (docs/memory.md)."""

    FULL = "full"
    BARRIER = "barrier"
    FSYNC = "fsync"


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def commands(durability: Durability, *, covered: bool) -> dict[str, int]:
    """fcntl commands to try before `fsync`, strongest first, by name."""
    if not IS_MAC or durability is Durability.FSYNC:
        return {}
    barrier = {"F_BARRIERFSYNC": _F_BARRIERFSYNC}
    return barrier if covered or durability is Durability.BARRIER else {"F_FULLFSYNC": _F_FULLFSYNC, **barrier}


def sync(fd: int, durability: Durability = Durability.FULL, *, covered: bool = False) -> None:
    """Sync the open file or folder `fd`, by the descriptor that wrote, before it is closed. Raises OSError.

    Without `covered`, earlier syncs on that drive are durable on return, too. With it, only order is ensured: an
    uncovered sync follows before anything is acknowledged. The next weaker kind replaces a refused one.
    """
    for name, command in commands(durability, covered=covered).items():
        try:
            fcntl.fcntl(fd, command)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            _warn_once(f"the file system refuses {name} ({error.strerror}): a loss of power may take the last turns")
        else:
            return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _REFUSALS or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
        _warn_once(f"the file system refuses to sync folders ({error.strerror}): a loss of power may take new files")


def sync_path(path: Path) -> None:
    """Sync a folder after renames, or a file that a library has closed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)
