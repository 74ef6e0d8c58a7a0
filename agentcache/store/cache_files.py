"""File access that no symbolic link can lead out of a folder: folders are opened one by one, links refused."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentcache.errors import BlockRejected, BrokenInvariant
from agentcache.system.durable import Durability, sync

log = logging.getLogger("agentcache.store")

# Some systems allow a process 256 descriptors.
_MOST_KEPT = 16
MOST_PARTS = 512  # IOV_MAX is 1024 on Linux and macOS
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe must not block.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# By file systems without modes.
_REFUSALS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_APPLE_DOUBLE = b"\0\5\x16\7"
_MAX_COMPANION_BYTES = 1 << 24


class WrongFile(BlockRejected, OSError):
    """Not a regular file (`NotAFile`), too long, or truncated. Other OSErrors say nothing about content."""


class NotAFile(WrongFile):
    """A folder, pipe or device instead of a file."""


class IsLink(OSError):
    """A symbolic link instead of a file."""


def whose(error: OSError | MemoryError) -> str:
    """Name the owner of an error's file, or of the folder that hides it; empty for this user."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str):
        return ""
    path = Path(error.filename)
    for each in (path, *path.parents) if path.is_absolute() else ():
        with suppress(OSError):
            owner, what = os.lstat(each).st_uid, "it" if each == path else each
            if owner == os.geteuid():
                return ""
            return f" ({what} belongs to user {owner}, and this process runs as user {os.geteuid()})"
    return ""


def set_mode(fd: int, mode: int) -> None:
    """Set an open file's or folder's mode, except own ones if the file system refuses modes."""
    status = os.fstat(fd)
    if stat.S_IMODE(status.st_mode) == mode:
        return
    try:
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in _REFUSALS or os.geteuid() not in (0, status.st_uid):
            raise
        _note_refusal(error.strerror)


@cache
def _note_refusal(reason: str) -> None:
    log.warning("the file system refuses to set modes (%s): other users may be able to read agents' files", reason)


@dataclass(slots=True)
class Descriptor:
    """An open file or folder."""

    fd: int
    is_kept: bool = False

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *error: object) -> None:
        if not self.is_kept:
            os.close(self.fd)


@dataclass(frozen=True)
class RegularFile:
    """An open file and its size; the caller closes it."""

    fd: int
    size: int

    def close(self) -> None:
        os.close(self.fd)

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        total = os.readv(self.fd, buffers[:MOST_PARTS])
        if total == self.size:  # usual; there may be many buffers
            return total
        views = skip_bytes([buffer for buffer in buffers if len(buffer)], total)
        while views and (count := os.readv(self.fd, views[:MOST_PARTS])):
            total += count
            views = skip_bytes(views, count)
        return total

    def require_all(self, count: int) -> None:
        """Raise if bytes are missing: WrongFile for a truncated file, else OSError."""
        if count < self.size:
            if os.fstat(self.fd).st_size <= count:
                raise WrongFile(f"the file ends before its {self.size} bytes")
            raise OSError(f"only {count} of {self.size} bytes could be read")


def skip_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    if count == sum(map(len, views)):
        return []
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


@dataclass(frozen=True)
class _Folder:
    descriptor: Descriptor
    identity: tuple[int, int]


class CacheFiles:
    """Files (0600) and folders (0700) below `root`, by absolute path. Raises NotADirectoryError for a linked folder."""

    def __init__(self, root: Path, durability: Durability = Durability.FULL) -> None:
        self.root = root
        self._durability = durability
        self._root = os.fspath(root)
        self.lasting: Collection[str] = ()  # folders that stay open after `keep_open`
        # Of files that root writes: the folder's owner must be able to read them. None if unknown.
        self._owner: tuple[int, int] | tuple[()] | None = None
        self._kept: dict[str, _Folder] = {}
        self._keeper: int | None = None  # thread in `keep_open`; only it uses kept folders

    def folder(self, path: Path | str) -> Descriptor:
        path = os.fspath(path)
        if self._keeper != threading.get_ident():
            return Descriptor(self._walk_to(path))
        if (kept := self._kept.get(path)) is not None:
            return kept.descriptor
        fd = self._walk_to(path)
        if len(self._kept) == _MOST_KEPT:
            return Descriptor(fd)
        folder = self._kept[path] = _Folder(Descriptor(fd, is_kept=True), _identity(os.fstat(fd)))
        return folder.descriptor

    def _walk_to(self, path: str) -> int:
        if path == self._root:
            return _open_folder(path)
        if not path.startswith(self._root + os.sep):
            raise ValueError(f"{path} is not below {self.root}")
        above, name = os.path.split(path)
        with self.folder(above) as parent, _naming(path):
            return _open_folder(name, parent)

    @contextmanager
    def keep_open(self) -> Iterator[bool]:
        """Keep folders open within the block, for one thread; yield whether it is the outermost block.

        A replaced folder goes unnoticed until a file in it is missing.
        """
        if self._keeper == threading.get_ident():
            yield False
            return
        if self._keeper is not None:
            raise BrokenInvariant("two threads write to the cache folder")
        self._keeper = threading.get_ident()
        try:
            self.close_replaced()
            yield True
        finally:
            self.close(set(self._kept).difference(self.lasting))
            self._keeper = None

    def close_replaced(self) -> bool:
        """Close replaced folders and those below; return whether there were any. Only within `keep_open`."""
        replaced: set[str] = set()
        for path in sorted(self._kept):  # parents first
            if os.path.dirname(path) in replaced or not self._is_in_place(path):
                replaced.add(path)
        self.close(replaced)
        return bool(replaced)

    def _is_in_place(self, path: str) -> bool:
        above, name = os.path.split(path)
        try:
            if (parent := self._kept.get(above)) is not None:
                status = os.stat(name, dir_fd=parent.descriptor.fd, follow_symlinks=False)
            else:
                status = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return _identity(status) == self._kept[path].identity

    def close(self, folders: Iterable[str] | None = None) -> None:
        for folder in list(self._kept) if folders is None else folders:
            os.close(self._kept.pop(folder).descriptor.fd)

    def make_folder(self, path: Path, *, sync: bool = True) -> None:
        """Create a missing folder; set its mode. Without `sync`, a sync of its parent makes it durable."""
        with self.folder(path.parent) as parent, _naming(path):
            with suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=parent)
                self._give_to_owner(path.name, parent)
                if sync:
                    self.sync(parent, covered=True)
            fd = _open_folder(path.name, parent)
        try:
            with _naming(path):
                set_mode(fd, 0o700)
        finally:
            os.close(fd)

    def identity(self, folder: Path) -> tuple[int, int]:
        """Device and inode, which differ in a replacement."""
        with self.folder(folder) as fd:
            kept = self._kept.get(os.fspath(folder))
            return _identity(os.fstat(fd)) if kept is None else kept.identity

    def sync(self, fd: int, *, covered: bool = False) -> None:
        sync(fd, self._durability, covered=covered)

    def sync_folder(self, path: Path, *, covered: bool = False) -> None:
        """Make renames and removals durable; if `covered`, after a later sync."""
        with self.folder(path) as fd:
            self.sync(fd, covered=covered)

    def free_bytes(self) -> int:
        with self.folder(self.root) as fd:
            status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def list_folder(self, path: Path) -> list[tuple[str, os.stat_result]]:
        found: list[tuple[str, os.stat_result]] = []
        with self.folder(path) as fd, os.scandir(fd) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    @staticmethod
    def describe(path: Path, error: OSError | MemoryError) -> str:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return f"{path.name} cannot be read: {reason}{whose(error)}"

    def open(self, path: Path | str, flags: int) -> Descriptor:
        above, name = os.path.split(path)
        with self.folder(above) as folder, _naming(path):
            fd = os.open(name, flags | _FILE, 0o600, dir_fd=folder)
        descriptor = Descriptor(fd)
        if flags & os.O_CREAT:
            try:
                set_mode(fd, 0o600)
                self._give_to_owner(fd)
            except BaseException:
                os.close(fd)
                raise
        return descriptor

    def _give_to_owner(self, file: int | str, folder: int | None = None) -> None:
        if self._owner is None:
            root = os.stat(self._root)
            self._owner = (root.st_uid, root.st_gid) if os.geteuid() == 0 and root.st_uid != 0 else ()
        if self._owner:
            with suppress(OSError):  # some file systems have no owners
                if isinstance(file, str):
                    os.chown(file, *self._owner, dir_fd=folder, follow_symlinks=False)
                else:
                    os.fchown(file, *self._owner)

    def status(self, path: Path) -> os.stat_result:
        above, name = os.path.split(path)
        with self.folder(above) as folder:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def all_there(self, folder: Path, names: Sequence[str]) -> bool:
        """Whether all files exist; `names` are `subfolder/file`."""
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

    def is_writable(self, path: Path) -> bool:
        """Whether this process may write; it can only replace another user's file."""
        with self.folder(path.parent) as folder:
            return os.access(path.name, os.W_OK, dir_fd=folder)

    def tighten(self, path: Path | str) -> None:
        above, name = os.path.split(path)
        with self.folder(above) as folder:
            os.chmod(name, 0o600, dir_fd=folder)

    def rename(self, source: Path, target: Path) -> None:
        (above, name), (new_above, new_name) = os.path.split(source), os.path.split(target)
        with self.folder(above) as one, self.folder(new_above) as other:
            os.replace(name, new_name, src_dir_fd=one, dst_dir_fd=other)

    def remove(self, path: Path | str) -> None:
        above, name = os.path.split(path)
        with suppress(FileNotFoundError), self.folder(above) as folder:
            os.unlink(name, dir_fd=folder)

    def read(self, path: Path, max_bytes: int) -> bytes:
        """Read a whole file. Raises WrongFile, IsLink; OSError or MemoryError if it is unavailable."""
        with closing(self.open_regular(path, max_bytes)) as file:
            data = bytearray(file.size)
            file.require_all(file.read_into([memoryview(data)]))
            return bytes(data)

    def open_regular(self, path: Path | str, max_bytes: int) -> RegularFile:
        try:
            try:
                fd = self.open(path, os.O_RDONLY).fd
            except FileNotFoundError:  # another program may have replaced a kept folder
                if self._keeper != threading.get_ident() or not self.close_replaced():
                    raise
                fd = self.open(path, os.O_RDONLY).fd
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise IsLink(f"{os.path.basename(path)} is a symbolic link") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise NotAFile("it is not a regular file")
            if status.st_size > max_bytes:
                raise WrongFile(f"it has {status.st_size} bytes, more than the {max_bytes} allowed")
        except BaseException:
            os.close(fd)
            raise
        return RegularFile(fd, status.st_size)

    def is_companion(self, path: Path | str) -> bool:
        """Whether the file is AppleDouble, by its content: an agent's id may start with `._`."""
        if not os.path.basename(path).startswith("._"):
            return False
        head = bytearray(len(_APPLE_DOUBLE))
        try:
            with closing(self.open_regular(path, _MAX_COMPANION_BYTES)) as file:
                file.read_into([memoryview(head)])
        except OSError:  # the file's reader reports it
            return False
        return head == _APPLE_DOUBLE


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class _naming:
    """Makes errors name the whole path, not only its last part."""

    __slots__ = ("_path",)

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = os.fspath(self._path)


def _open_folder(path: str | Path, parent: int | None = None) -> int:
    try:
        return os.open(path, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise NotADirectoryError(f"{path} is not a folder, or a link to one") from None
