"""The files below one folder, which no symbolic link can lead out of.

Every call (or several together: `CacheFiles.keep_open`) walks down from the root, folder by folder, by descriptors that
links cannot give, or has the kernel do so: what is put in a folder's place while we run makes the call fail, and
nothing outside is touched.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agentcache.durable import Durability, sync
from agentcache.errors import BlockRejected, BrokenInvariant
from agentcache.store.openat2 import open_below

# Descriptors are few: a process may have 256 on some systems.
_MOST_KEPT = 16
MOST_PARTS = 512  # a call reads or writes at most IOV_MAX buffers, 1024 on Linux and on a Mac
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without waiting: opening a pipe would, until its other end is opened.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


_APPLE_DOUBLE = b"\0\5\x16\7"
_MAX_COMPANION_BYTES = 1 << 24


class WrongFile(BlockRejected, OSError):
    """No regular file (`NotAFile`), or longer than a file of its kind can be: its status says so, without a read.

    Every other OSError says nothing about a file's content.
    """


class NotAFile(WrongFile):
    """A folder, pipe or device in a file's place. It was not read, and the file may come back."""


class IsLink(OSError):
    """A symbolic link in a file's place. What it leads to was not read."""


def whose(error: OSError | MemoryError) -> str:
    """The owner of the file that an error names, where that is another user than this process's."""
    if isinstance(error, PermissionError) and isinstance(error.filename, str) and os.path.isabs(error.filename):
        with suppress(OSError):
            if (owner := os.lstat(error.filename).st_uid) != os.geteuid():
                return f" (it belongs to user {owner}, and this process runs as user {os.geteuid()})"
    return ""


@dataclass(slots=True)
class Descriptor:
    """An open file or folder; closed at the end of the `with`, unless it is kept."""

    fd: int
    is_kept: bool = False

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *error: object) -> None:
        if not self.is_kept:
            os.close(self.fd)


@dataclass(frozen=True)
class RegularFile:
    """An open file, and the bytes it had when it was opened. Its owner closes it."""

    fd: int
    size: int

    def close(self) -> None:
        os.close(self.fd)

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        """Fill one buffer after the other with what comes next; returns the bytes read, fewer where the file ends."""
        total = os.readv(self.fd, buffers[:MOST_PARTS])
        if total == self.size:  # as a rule, and there may be many buffers
            return total
        views = skip_bytes([buffer for buffer in buffers if len(buffer)], total)
        while views and (count := os.readv(self.fd, views[:MOST_PARTS])):
            total += count
            views = skip_bytes(views, count)
        return total

    def require_all(self, count: int) -> None:
        """Raise unless `count`, which was read, is all of it: WrongFile if it got shorter in between, else OSError."""
        if count < self.size:
            if os.fstat(self.fd).st_size <= count:
                raise WrongFile(f"the file ends before its {self.size} bytes")
            raise OSError(f"only {count} of {self.size} bytes could be read")


def skip_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What of buffers, taken one after the other, comes behind the first `count` bytes."""
    if count == sum(map(len, views)):  # as a rule, and there may be many
        return []
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


@dataclass(frozen=True)
class _Folder:
    """One that is kept open."""

    descriptor: Descriptor
    identity: tuple[int, int]


class CacheFiles:
    """Files and folders below `root`, by their whole paths. Folders are 0700, whatever the umask.

    Every method raises OSError: FileNotFoundError where something is not there, NotADirectoryError where a folder on
    the way is something else or a link.

    Args:
        root: an absolute path; links above it are the user's own.
        durability: how far syncs go.

    Attributes:
        lasting: folders that stay open from one `keep_open` to the next, until `close`.
    """

    def __init__(self, root: Path, durability: Durability = Durability.FULL) -> None:
        self.root = root
        self._durability = durability
        self._root = os.fspath(root)
        self.lasting: Collection[str] = ()
        self._owner: tuple[int, int] | tuple[()] | None = None  # who gets new files; None until one is made
        self._kept: dict[str, _Folder] = {}
        self._keeper: int | None = None  # the thread inside `keep_open`, which alone may use and close them

    def folder(self, path: Path | str) -> Descriptor:
        """A folder: the root, or one below it."""
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
        """Meanwhile this thread walks down to a folder once, and not for every file; says whether it is not so already.

        What takes a folder's place meanwhile is not seen: work goes on in the folder that was there. One thread at a
        time.
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
            self._close(set(self._kept).difference(self.lasting))
            self._keeper = None

    def close_replaced(self) -> None:
        """Within `keep_open`: no longer work in folders that are not where they were, nor in folders below them."""
        replaced: set[str] = set()
        for path in sorted(self._kept):  # a folder comes before those in it
            if os.path.dirname(path) in replaced or not self._is_in_place(path):
                replaced.add(path)
        self._close(replaced)

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

    def close(self) -> None:
        """Keep nothing open any more."""
        self._close(list(self._kept))

    def _close(self, folders: Iterable[str]) -> None:
        for folder in folders:
            os.close(self._kept.pop(folder).descriptor.fd)

    def make_folder(self, path: Path, *, sync: bool = True) -> None:
        """Make sure that `path` is a folder of ours.

        Args:
            sync: a new one is durable before what is written later; else once its parent has been synced.
        """
        with self.folder(path.parent) as parent, _naming(path):
            with suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=parent)
                self._give_to_owner(path.name, parent)
                if sync:
                    self.sync(parent, covered=True)
            fd = _open_folder(path.name, parent)
        try:
            with _naming(path):
                if stat.S_IMODE(os.fstat(fd).st_mode) != 0o700:
                    os.fchmod(fd, 0o700)
        finally:
            os.close(fd)

    def identity(self, folder: Path) -> tuple[int, int]:
        """Device and inode: another folder in the same place has others."""
        with self.folder(folder) as fd:
            kept = self._kept.get(os.fspath(folder))
            return _identity(os.fstat(fd)) if kept is None else kept.identity

    def sync(self, fd: int, *, covered: bool = False) -> None:
        """As `durable.sync`, as far as the setting wants it."""
        sync(fd, self._durability, covered=covered)

    def sync_folder(self, path: Path, *, covered: bool = False) -> None:
        """Make renames and removals in the folder durable; if `covered`, once a later sync without it has ended."""
        with self.folder(path) as fd:
            self.sync(fd, covered=covered)

    def free_bytes(self) -> int:
        """Bytes of the disk that this user may still write."""
        with self.folder(self.root) as fd:
            status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def list_folder(self, path: Path) -> list[tuple[str, os.stat_result]]:
        """Names in a folder, and what they are (of a link: the link itself)."""
        found: list[tuple[str, os.stat_result]] = []
        with self.folder(path) as fd, os.scandir(fd) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it was removed in between
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    @staticmethod
    def describe(path: Path, error: OSError | MemoryError) -> str:
        """What keeps `path` from being read, and whose it is where that may be the cause."""
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return f"{path.name} cannot be read: {reason}{whose(error)}"

    def open(self, path: Path | str, flags: int) -> Descriptor:
        """A file. A new one is 0600, whatever the umask."""
        above, name = os.path.split(path)
        with self.folder(above) as folder, _naming(path):
            fd = os.open(name, flags | _FILE, 0o600, dir_fd=folder)
        descriptor = Descriptor(fd)
        if flags & os.O_CREAT:
            try:
                os.fchmod(fd, 0o600)
                self._give_to_owner(fd)
            except BaseException:
                os.close(fd)
                raise
        return descriptor

    def _give_to_owner(self, file: int | str, folder: int | None = None) -> None:
        """What root makes in another user's cache folder belongs to that user, who could not read it otherwise."""
        if self._owner is None:
            root = os.stat(self._root)
            self._owner = (root.st_uid, root.st_gid) if os.geteuid() == 0 and root.st_uid != 0 else ()
        if self._owner:
            with suppress(OSError):  # a file system may know no owners
                os.chown(file, *self._owner, dir_fd=folder)

    def status(self, path: Path) -> os.stat_result:
        """What is at `path`; of a link, the link itself."""
        above, name = os.path.split(path)
        with self.folder(above) as folder:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

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

    def is_writable(self, path: Path) -> bool:
        """Whether this process may write to a file; another user's may only be read, or replaced."""
        with self.folder(path.parent) as folder:
            return os.access(path.name, os.W_OK, dir_fd=folder)

    def tighten(self, path: Path | str) -> None:
        """Close a file to others."""
        above, name = os.path.split(path)
        with self.folder(above) as folder:
            os.chmod(name, 0o600, dir_fd=folder)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file, in place of what is at `target`."""
        (above, name), (new_above, new_name) = os.path.split(source), os.path.split(target)
        with self.folder(above) as one, self.folder(new_above) as other:
            os.replace(name, new_name, src_dir_fd=one, dst_dir_fd=other)

    def remove(self, path: Path | str) -> None:
        """Delete a file, if it is there."""
        above, name = os.path.split(path)
        with suppress(FileNotFoundError), self.folder(above) as folder:
            os.unlink(name, dir_fd=folder)

    def read(self, path: Path, max_bytes: int) -> bytes:
        """The whole content of a regular file, all of it or an error.

        Raises:
            NotAFile: it is no regular file.
            WrongFile: it is longer than `max_bytes`.
            IsLink: it is a symbolic link.
            OSError, MemoryError: it cannot be read now.
        """
        with closing(self.open_regular(path, max_bytes)) as file:
            data = bytearray(file.size)
            file.require_all(file.read_into([memoryview(data)]))
            return bytes(data)

    def open_regular(self, path: Path | str, max_bytes: int) -> RegularFile:
        """A regular file, to read; raises NotAFile, WrongFile and IsLink as `read` does."""
        fd = self._open_at_once(os.fspath(path))
        if fd is None:
            try:
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
                raise WrongFile(f"it has {status.st_size} bytes, at most {max_bytes} make sense")
        except BaseException:
            os.close(fd)
            raise
        return RegularFile(fd, status.st_size)

    def is_companion(self, path: Path | str) -> bool:
        """Whether it is AppleDouble: what macOS keeps beside a file where the drive takes no attributes (exFAT, SMB).

        Its name alone does not tell, for an agent's id may begin likewise.
        """
        if not os.path.basename(path).startswith("._"):
            return False
        head = bytearray(len(_APPLE_DOUBLE))
        try:
            with closing(self.open_regular(path, _MAX_COMPANION_BYTES)) as file:
                file.read_into([memoryview(head)])
        except OSError:  # the file's reader reports it
            return False
        return head == _APPLE_DOUBLE

    def _open_at_once(self, path: str) -> int | None:
        """A file that is there, to read; None where only walking down to it tells what is."""
        begin = len(self._root) + 1
        if path[:begin] != self._root + os.sep:
            return None
        with self.folder(self._root) as root:
            return open_below(root, path[begin:], os.O_RDONLY | _FILE)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class _naming:
    """Has errors name the whole path: calls by descriptor know the last part of it only."""

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
