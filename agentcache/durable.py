"""Has the drive keep what was written: the one module that syncs files and folders.

On Linux `fsync` flushes the drive's own cache. On macOS it does not (fsync(2) there): F_FULLFSYNC does, and takes
milliseconds; F_BARRIERFSYNC only keeps the drive from writing later data first, and is several times faster.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import sys
from enum import StrEnum
from pathlib import Path

log = logging.getLogger("agentcache.store")

IS_MAC = sys.platform == "darwin"

# From Darwin's <sys/fcntl.h>; Python does not name both in every version.
_F_FULLFSYNC, _F_BARRIERFSYNC = 51, 85
# File systems that cannot do it, such as exFAT and SMB, refuse by one of these.
_REFUSALS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS}


class Durability(StrEnum):
    """How far a sync goes on macOS. Elsewhere all three are `fsync`, which flushes the drive."""

    FULL = "full"  # a saved turn outlives a loss of power: the drive is flushed once a turn
    BARRIER = "barrier"  # an agent is whole after a loss of power; its last turns may be missing
    FSYNC = "fsync"  # the drive may reorder: after a loss of power files may be damaged, which readers notice


class _Notes:
    """What was logged once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def give(self, text: str) -> None:
        if text not in self._given:
            self._given.add(text)
            log.warning("%s", text)


_notes = _Notes()


def commands(durability: Durability, *, covered: bool) -> dict[str, int]:
    """The fcntl commands of this system to try in front of `fsync`, strongest first, by their names."""
    if not IS_MAC or durability is Durability.FSYNC:
        return {}
    barrier = {"F_BARRIERFSYNC": _F_BARRIERFSYNC}
    return barrier if covered or durability is Durability.BARRIER else {"F_FULLFSYNC": _F_FULLFSYNC, **barrier}


def sync(fd: int, durability: Durability = Durability.FULL, *, covered: bool = False) -> None:
    """Sync the open file or folder `fd`. Call it on the descriptor that wrote, before that is closed.

    Without `covered`, everything that was synced before on that drive is kept on return, too.

    Args:
        covered: whether a later sync without it follows before anything is acknowledged. Then only the order is kept.

    Raises:
        OSError: the data could not be written. A file system that refuses a kind of sync gets the next weaker one.
    """
    for name, command in commands(durability, covered=covered).items():
        try:
            fcntl.fcntl(fd, command)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            _notes.give(f"the file system refuses {name} ({error.strerror}): a loss of power may take the last turns")
        else:
            return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _REFUSALS or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
        _notes.give(f"the file system refuses to sync folders ({error.strerror}): a loss of power may take new files")


def sync_path(path: Path) -> None:
    """Sync a folder after renames in it, or a file that a library has written and closed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)
