"""What lies in a cache folder, in bytes, and where rejected files go."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agentcache.blocks.keys import BASE_CACHE, RESIDUAL
from agentcache.blocks.ledger import STATE
from agentcache.errors import DiskBudgetExceeded
from agentcache.store.atomic import TEMP_SUFFIX, replace_file
from agentcache.store.cache_files import CacheFiles, WrongFile
from agentcache.store.disk_budget import HINT, DiskBudget, automatic_budget, explicit_budget

AGENTS = "agents"
_BLOCKS, _QUARANTINE = "blocks", "quarantine"

logger = logging.getLogger("agentcache.store")


class DiskUsage:
    """Owner of the sizes of all files of the cache, of the budget they must keep to, and of the quarantine folder.

    A file's kind is the folder that it is in or, of a block, what it holds: keys and values of base, unless told.
    Readers reject files on their own threads, so every method may be called from any thread.

    Args:
        files: the way to them.
        budget: bytes that the user lets all files take together; None for an automatic budget.

    Attributes:
        total: bytes that they take: blocks, manifests, logs, quarantine.
        written, read: bytes written, and bytes of blocks read, since start.
        quarantined: blocks and agents rejected since start.
    """

    def __init__(self, files: CacheFiles, budget: int | None) -> None:
        self._explicit = None if budget is None else explicit_budget(budget)
        self._measured: DiskBudget | None = None
        self.total = 0
        self.written = 0
        self.read = 0
        self.quarantined = 0
        self._files = files
        self._quarantine = files.root / _QUARANTINE
        self._sizes: dict[str, int] = {}
        self._kinds: dict[str, str] = {}  # of blocks, where it is not base's keys and values
        self._by_kind: Counter[str] = Counter()
        self._lock = threading.Lock()

    def start_over(self) -> None:
        """Forget all files but those in quarantine, at which it looks again; the others are to be adopted."""
        with self._lock:
            self._sizes = {}
            self._kinds = {}
            self._by_kind.clear()
            self.total = 0
        self._files.make_folder(self._quarantine)
        for name, status in self._files.list_folder(self._quarantine):
            self._record(str(self._quarantine / name), _size_of(status))

    def __contains__(self, path: Path | str) -> bool:
        return str(path) in self._sizes

    def paths(self, folder: Path) -> list[str]:
        """The known files anywhere below `folder`. As text: there may be hundreds of thousands."""
        beginning = f"{folder}/"
        with self._lock:
            return [path for path in self._sizes if path.startswith(beginning)]

    def size_of(self, path: Path | str) -> int:
        """Bytes of the file at `path`; 0 where there is none."""
        return self._sizes.get(str(path), 0)

    @property
    def plan(self) -> DiskBudget:
        """The budget that applies now."""
        return self._explicit or self._measured or self.measure()

    @property
    def budget(self) -> int:
        """Bytes that all files together may take."""
        return self.plan.num_bytes

    @property
    def evicts(self) -> bool:
        """Whether files go to keep the budget: only the user's own budget is worth an agent's memory."""
        return self._explicit is not None

    @property
    def free(self) -> int:
        """Bytes left of the budget; negative when the user has lowered it since the files were written."""
        return self.budget - self.total

    def measure(self) -> DiskBudget:
        """Take an automatic budget anew from what is free now. Raises OSError where the disk does not say."""
        if self._explicit is None:
            self._measured = automatic_budget(self._files.free_bytes(), self.total)
        return self.plan

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more fit the budget. An automatic one that is hit is measured anew first."""
        if num_bytes > self.free and not self.evicts:
            with suppress(OSError):
                self.measure()
        return num_bytes <= self.free

    def refusal(self, num_bytes: int) -> str:
        """Why `num_bytes` more do not fit, for people."""
        message = f"{num_bytes} bytes more would pass the disk budget: {self.total} of {self.budget} are in use"
        return message if self.evicts else f"{message}. The budget is automatic ({self.plan.reason}): {HINT}"

    @property
    def by_kind(self) -> dict[str, int]:
        """The total by what files hold: keys and values of base, residuals, recurrent state, agents, rejected files."""
        return {kind: self._by_kind[kind] for kind in (BASE_CACHE, RESIDUAL, STATE, AGENTS, _QUARANTINE)}

    def bytes_of(self, kind: str) -> int:
        """Bytes of all files of that kind, of every model."""
        return self._by_kind[kind]

    def classify(self, path: str, kind: str) -> None:
        """The block at `path`, there or not, is of this kind."""
        with self._lock:
            size = self._sizes.get(path, 0)
            self._by_kind[self._kind_of(path)] -= size
            if kind == BASE_CACHE:
                self._kinds.pop(path, None)
            else:
                self._kinds[path] = kind
            self._by_kind[kind] += size

    def record_written(self, path: Path, size: int, written: int) -> None:
        """The file at `path` has `size` bytes now that `written` bytes of it have been written."""
        self._record(str(path), size)
        with self._lock:
            self.written += written

    def refresh(self, path: Path) -> None:
        """Look again at a file whose write has failed: it may be there or not."""
        try:
            self._record(str(path), self._files.status(path).st_size)
        except OSError:
            self.forget(path)

    def record_read(self, num_bytes: int) -> None:
        """So many bytes have been read."""
        with self._lock:
            self.read += num_bytes

    def remove(self, path: Path | str) -> int:
        """Delete the file, if it is there; returns the bytes it had."""
        self._files.remove(path)
        return self.forget(path)

    def forget(self, path: Path | str) -> int:
        """The file at `path` is gone; returns the bytes it had."""
        path = str(path)
        with self._lock:
            size = self._sizes.pop(path, 0)
            self.total -= size
            self._by_kind[self._kind_of(path)] -= size
            self._kinds.pop(path, None)
            return size

    def require(self, num_bytes: int) -> None:
        """Make sure that `num_bytes` more fit the budget; to keep the user's own, files in quarantine give way.

        Raises:
            DiskBudgetExceeded: they do not.
        """
        if self.evicts and num_bytes > self.free:
            self._empty_quarantine()
        if not self.has_room(num_bytes):
            raise DiskBudgetExceeded(self.refusal(num_bytes), num_bytes)

    def adopt(self, folder: Path) -> list[Path]:
        """Take stock of a folder of files; temporary ones go. Returns what is no regular file; that is known, too.

        Raises:
            OSError: the folder cannot be listed.
        """
        strange: list[Path] = []
        for name, status in self._files.list_folder(folder):
            path = f"{folder}/{name}"
            if not stat.S_ISREG(status.st_mode):
                strange.append(Path(path))
                self._record(path, _size_of(status))
            elif name.endswith(TEMP_SUFFIX):
                with suppress(OSError):  # another user's, say
                    self._files.remove(path)
            else:
                if status.st_mode & 0o077:
                    with suppress(OSError):
                        self._files.tighten(path)
                self._record(path, status.st_size)
        return strange

    def adopt_blocks(self, parent: Path) -> None:
        """Take stock of the folders of blocks in `parent`. Links and what is no regular file go to quarantine.

        Raises:
            OSError: one of the folders cannot be listed.
        """
        for name, status in self._files.list_folder(parent):
            if stat.S_ISLNK(status.st_mode):
                self.quarantine("it is a symbolic link", parent / name)
            elif stat.S_ISDIR(status.st_mode):
                self._files.make_folder(parent / name)
                for path in self.adopt(parent / name):
                    self.quarantine("it is not a regular file", path)

    def adopt_agents(self, parent: Path) -> tuple[list[Path], dict[str, str]]:
        """Take stock of the folders of agents in `parent`: those that can be used, and why others cannot, by name.

        Nothing is moved: whether a file of an agent is wrong only its content tells.
        """
        folders: list[Path] = []
        unavailable: dict[str, str] = {}
        for name, status in self._files.list_folder(parent):
            if not stat.S_ISDIR(status.st_mode) and not stat.S_ISLNK(status.st_mode):
                continue
            try:
                self._files.make_folder(parent / name)
                self.adopt(parent / name)
                folders.append(parent / name)
            except OSError as error:
                unavailable[name] = self._files.describe(parent / name, error)
        return folders, unavailable

    def quarantine(self, reason: str, *paths: Path) -> None:
        """Take files that must not be used out of the way: one log line, one count. Never raises."""
        moved = [path for path in paths if self._move_to_quarantine(path)]
        if moved:
            self._count(reason, moved[0])

    def has_quarantined(self, *suffixes: str) -> bool:
        """Whether quarantine holds a file whose name ended with one of `suffixes`."""
        names = (path.rpartition(".")[0] for path in self.paths(self._quarantine))
        return any(name.endswith(suffixes) for name in names)

    def remove_quarantined(self, is_meant: Callable[[str], bool]) -> None:
        """Delete files in quarantine by the names that they had. Raises OSError."""
        for path in list(self.paths(self._quarantine)):
            if is_meant(path.rpartition("/")[2].rpartition(".")[0]):
                self.remove(path)

    def empty_quarantine(self) -> int:
        """Delete what is in quarantine; returns the bytes freed."""
        before = self.bytes_of(_QUARANTINE)
        self._empty_quarantine()
        return before - self.bytes_of(_QUARANTINE)

    def quarantine_copy(self, reason: str, path: Path, max_bytes: int) -> None:
        """Keep what is at `path` in quarantine before it is replaced.

        A copy, for the file has to stay in its place until then; what is no regular file is moved.

        Raises:
            OSError: it cannot be copied.
        """
        try:
            data = self._files.read(path, max_bytes)
        except WrongFile:
            self.quarantine(reason, path)
            return
        target = self._quarantine / f"{path.name}.{secrets.token_hex(6)}"
        self._files.make_folder(self._quarantine)
        replace_file(self._files, target, data, "quarantine", lambda step: None)
        self._record(str(target), len(data))
        self._count(reason, path)

    def _count(self, reason: str, path: Path) -> None:
        with self._lock:
            self.quarantined += 1
        logger.warning("quarantined %s: %s", path.relative_to(self._files.root), reason)

    def _move_to_quarantine(self, path: Path) -> bool:
        """Whether there was anything at `path`; False when another reader was faster."""
        target = self._quarantine / f"{path.name}.{secrets.token_hex(6)}"
        try:
            self._files.make_folder(self._quarantine)
            self._files.rename(path, target)
            self._record(str(target), _size_of(self._files.status(target)))
        except FileNotFoundError:
            self.forget(path)
            return False
        except OSError as error:
            logger.error("cannot move %s to quarantine: %s", path, error)
        self.forget(path)
        return True

    def _record(self, path: str, size: int) -> None:
        with self._lock:
            grown = size - self._sizes.get(path, 0)
            self.total += grown
            self._by_kind[self._kind_of(path)] += grown
            self._sizes[path] = size

    def _kind_of(self, path: str) -> str:
        folder = path[len(str(self._files.root)) + 1 :].partition("/")[0]
        return self._kinds.get(path, BASE_CACHE) if folder == _BLOCKS else folder

    def _empty_quarantine(self) -> None:
        for path in self.paths(self._quarantine):
            with suppress(OSError):
                self.remove(path)


def _size_of(status: os.stat_result) -> int:
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_size
