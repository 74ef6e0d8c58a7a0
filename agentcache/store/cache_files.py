"""The files below one folder, which no symbolic link can lead out of.

Every call (or several together: `CacheFiles.keep_open`) walks down from the root, folder by folder, by descriptors that
links cannot give: what somebody puts in a folder's place while we run makes the call fail, and nothing outside is
touched.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# Descriptors are few: a process may have 256 on some systems.
_MOST_KEPT = 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class CacheFiles:
    """Files and folders below `root`, by their whole paths. Folders are 0700, whatever the umask.

    Every method raises OSError: FileNotFoundError where something is not there, NotADirectoryError where a folder on
    the way is something else or a link.

    Args:
        root: an absolute path; links above it are the user's own.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._thread = threading.local()

    @contextmanager
    def folder(self, path: Path) -> Iterator[int]:
        """A descriptor of a folder, the root or below it; closed at the end."""
        kept: dict[Path, int] | None = getattr(self._thread, "kept", None)
        if kept is not None and path in kept:
            yield kept[path]
            return
        fd = self._walk_to(path)
        if kept is not None and len(kept) < _MOST_KEPT:
            kept[path] = fd
            yield fd
            return
        try:
            yield fd
        finally:
            os.close(fd)

    def _walk_to(self, path: Path) -> int:
        if path == self.root:
            return _open_folder(path)
        if not path.is_relative_to(self.root):
            raise ValueError(f"{path} is not below {self.root}")
        with self.folder(path.parent) as parent:
            return _open_folder(path.name, parent)

    @contextmanager
    def keep_open(self) -> Iterator[bool]:
        """Meanwhile this thread walks down to a folder once, and not for every file; says whether it is not so already.

        What takes a folder's place meanwhile is not seen: work goes on in the folder that was there.
        """
        if hasattr(self._thread, "kept"):
            yield False
            return
        self._thread.kept = {}
        try:
            yield True
        finally:
            self.close_kept()
            del self._thread.kept

    def close_kept(self) -> None:
        """Within `keep_open`: walk down to every folder again."""
        kept: dict[Path, int] = getattr(self._thread, "kept", {})
        while kept:
            os.close(kept.popitem()[1])

    def make_folder(self, path: Path) -> None:
        """Make sure that `path` is a folder of ours; a new one is durable on return."""
        with self.folder(path.parent) as parent:
            with suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=parent)
                os.fsync(parent)
            fd = _open_folder(path.name, parent)
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) != 0o700:
                os.fchmod(fd, 0o700)
        finally:
            os.close(fd)

    def identity(self, folder: Path) -> tuple[int, int]:
        """Device and inode: another folder in the same place has others."""
        with self.folder(folder) as fd:
            status = os.fstat(fd)
        return status.st_dev, status.st_ino

    def sync_folder(self, path: Path) -> None:
        """Make renames and removals in the folder durable."""
        with self.folder(path) as fd:
            os.fsync(fd)

    def list_folder(self, path: Path) -> list[tuple[str, os.stat_result]]:
        """Names in a folder, and what they are (of a link: the link itself)."""
        with self.folder(path) as fd, os.scandir(fd) as entries:
            return [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]

    @contextmanager
    def open(self, path: Path, flags: int) -> Iterator[int]:
        """A descriptor of a file; closed at the end. A new file is 0600, whatever the umask."""
        with self.folder(path.parent) as folder:
            # Without waiting: opening a pipe would, until somebody comes to its other end.
            fd = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            if flags & os.O_CREAT:
                os.fchmod(fd, 0o600)
            yield fd
        finally:
            os.close(fd)

    def status(self, path: Path) -> os.stat_result:
        """What is at `path`; of a link, the link itself."""
        with self.folder(path.parent) as folder:
            return os.stat(path.name, dir_fd=folder, follow_symlinks=False)

    def all_there(self, folder: Path, names: Sequence[str]) -> bool:
        """Whether all of `names`, each of a file in a folder in `folder`, are there."""
        with self.folder(folder) as fd:
            try:
                for name in {name.partition("/")[0] for name in names}:
                    if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                        raise NotADirectoryError(f"{name} is not a folder, or a link to one")
                for name in names:
                    os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return True

    def tighten(self, path: Path) -> None:
        """Close a file to others."""
        with self.folder(path.parent) as folder:
            os.chmod(path.name, 0o600, dir_fd=folder)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file, in place of what is at `target`."""
        with self.folder(source.parent) as one, self.folder(target.parent) as other:
            os.replace(source.name, target.name, src_dir_fd=one, dst_dir_fd=other)

    def remove(self, path: Path) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError), self.folder(path.parent) as folder:
            os.unlink(path.name, dir_fd=folder)

    def read(self, path: Path, max_bytes: int) -> bytes:
        """The whole content of a regular file; OSError also where it is longer than `max_bytes`."""
        with self.open(path, os.O_RDONLY) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("it is not a regular file")
            if status.st_size > max_bytes:
                raise OSError(f"it has {status.st_size} bytes, at most {max_bytes} make sense")
            return _read_all(fd, status.st_size)


def _open_folder(path: str | Path, parent: int | None = None) -> int:
    try:
        return os.open(path, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise NotADirectoryError(f"{path} is not a folder, or a link to one") from None


def _read_all(fd: int, size: int) -> bytes:
    data = os.read(fd, size)
    while 0 < len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data
