"""File sizes, the disk budget, and the quarantine."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentcache.api.stats import STATE
from agentcache.blocks.keys import BASE_CACHE, RESIDUAL
from agentcache.errors import DiskBudgetExceeded
from agentcache.store.cache_files import CacheFiles, WrongFile
from agentcache.store.writing import TEMP_SUFFIX, replace_file

AUTO_SHARE = 0.20
AUTO_CEILING = 100 * 10**9

HINT = "set --disk-budget (AGENTCACHE_DISK_BUDGET, disk_budget in the config file) or delete agents"

AGENTS, QUARANTINE = "agents", "quarantine"
_BLOCKS = "blocks"

logger = logging.getLogger("agentcache.store")


@dataclass(frozen=True)
class DiskBudget:
    """A limit in bytes for all files of a cache folder."""

    num_bytes: int
    is_automatic: bool
    reason: str

    @property
    def kind(self) -> str:
        return "automatic" if self.is_automatic else "explicit"

    def __str__(self) -> str:
        return f"{self.num_bytes / 1e9:.1f} GB, {self.kind}: {self.reason}"


def explicit_budget(num_bytes: int) -> DiskBudget:
    return DiskBudget(num_bytes, False, "disk_budget is set; the stalest agents' blocks are evicted to keep it")


def automatic_budget(free: int, held: int) -> DiskBudget:
    """Return a share of the disk, at least the `held` bytes."""
    share = min(int((free + held) * AUTO_SHARE), AUTO_CEILING)
    measured = f"{free / 1e9:.1f} GB are free and {held / 1e9:.1f} GB held"
    if share <= held:
        return DiskBudget(held, True, f"the bytes in use, as {measured}; nothing is evicted, nothing can be added")
    limit = f"{AUTO_CEILING / 1e9:.0f} GB at most" if share == AUTO_CEILING else f"{AUTO_SHARE:.0%} of both"
    return DiskBudget(share, True, f"{limit}, for {measured}; it limits growth and evicts nothing")


class DiskUsage:
    """File sizes and the disk budget, automatic if `budget` is None. Thread-safe.

    A file's kind is its top folder; a block's is its content, base KV by default.
    """

    def __init__(self, files: CacheFiles, budget: int | None) -> None:
        self._explicit = None if budget is None else explicit_budget(budget)
        self._measured: DiskBudget | None = None
        self.total = 0  # bytes of all files, with quarantine
        self.written = 0  # bytes since start
        self.read = 0  # of blocks
        self._files = files
        self.quarantine = Quarantine(files, self)
        self._sizes: dict[str, int] = {}
        self._kinds: dict[str, str] = {}  # of blocks other than base KV
        self._by_kind: Counter[str] = Counter()
        self._lock = threading.Lock()

    def start_over(self) -> None:
        """Forget files outside quarantine, before they are adopted again."""
        with self._lock:
            self._sizes = {}
            self._kinds = {}
            self._by_kind.clear()
            self.total = 0
        self.quarantine.adopt()

    def __contains__(self, path: Path | str) -> bool:
        return str(path) in self._sizes

    def paths(self, folder: Path) -> list[str]:
        beginning = f"{folder}/"  # strings: there may be hundreds of thousands
        with self._lock:
            return [path for path in self._sizes if path.startswith(beginning)]

    def size_of(self, path: Path | str) -> int:
        return self._sizes.get(str(path), 0)

    @property
    def plan(self) -> DiskBudget:
        return self._explicit or self._measured or self.measure()

    @property
    def budget(self) -> int:
        return self.plan.num_bytes

    @property
    def evicts(self) -> bool:
        """Whether files may be evicted: only for an explicit budget."""
        return self._explicit is not None

    @property
    def free(self) -> int:
        return self.budget - self.total

    def measure(self) -> DiskBudget:
        if self._explicit is None:
            self._measured = automatic_budget(self._files.free_bytes(), self.total)
        return self.plan

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more fit; recomputes an exhausted automatic budget."""
        if num_bytes > self.free and not self.evicts:
            with suppress(OSError):
                self.measure()
        return num_bytes <= self.free

    def refusal(self, num_bytes: int) -> str:
        message = f"{num_bytes} bytes more would exceed the disk budget: {self.total} of {self.budget} are in use"
        return message if self.evicts else f"{message}. The budget is automatic ({self.plan.reason}): {HINT}"

    @property
    def by_kind(self) -> dict[str, int]:
        return {kind: self._by_kind[kind] for kind in (BASE_CACHE, RESIDUAL, STATE, AGENTS, QUARANTINE)}

    def bytes_of(self, kind: str) -> int:
        return self._by_kind[kind]

    def classify(self, path: str, kind: str) -> None:
        """Set a block's kind, before or after it is written."""
        with self._lock:
            size = self._sizes.get(path, 0)
            self._by_kind[self._kind_of(path)] -= size
            if kind == BASE_CACHE:
                self._kinds.pop(path, None)
            else:
                self._kinds[path] = kind
            self._by_kind[kind] += size

    def record_written(self, path: Path, size: int, written: int) -> None:
        self.record(str(path), size)
        with self._lock:
            self.written += written

    def refresh(self, path: Path) -> None:
        try:
            self.record(str(path), self._files.status(path).st_size)
        except OSError:
            self.forget(path)

    def record_read(self, num_bytes: int) -> None:
        with self._lock:
            self.read += num_bytes

    def remove(self, path: Path | str) -> int:
        self._files.remove(path)
        return self.forget(path)

    def move(self, source: Path, target: Path) -> None:
        """Rename a file, not yet durably."""
        self._files.rename(source, target)
        self.forget(source)
        self.refresh(target)

    def forget(self, path: Path | str) -> int:
        """Record that a file is gone; return its size."""
        path = str(path)
        with self._lock:
            size = self._sizes.pop(path, 0)
            self.total -= size
            self._by_kind[self._kind_of(path)] -= size
            self._kinds.pop(path, None)
            return size

    def require(self, num_bytes: int) -> None:
        """Raise DiskBudgetExceeded unless `num_bytes` more fit. Empties quarantine first if the budget is explicit."""
        if self.evicts and num_bytes > self.free:
            self.quarantine.empty()
        if not self.has_room(num_bytes):
            raise DiskBudgetExceeded(self.refusal(num_bytes), num_bytes)

    def record(self, path: str, size: int) -> None:
        with self._lock:
            grown = size - self._sizes.get(path, 0)
            self.total += grown
            self._by_kind[self._kind_of(path)] += grown
            self._sizes[path] = size

    def _kind_of(self, path: str) -> str:
        folder = path[len(str(self._files.root)) + 1 :].partition("/")[0]
        return self._kinds.get(path, BASE_CACHE) if folder == _BLOCKS else folder


class Quarantine:
    """Files that failed verification. Thread-safe: readers add files."""

    def __init__(self, files: CacheFiles, usage: DiskUsage) -> None:
        self.count = 0  # blocks and agents added since start
        self._files = files
        self._folder = files.root / QUARANTINE
        self._usage = usage
        self._lock = threading.Lock()

    def adopt(self) -> None:
        self._files.make_folder(self._folder)
        for name, status in self._files.list_folder(self._folder):
            self._usage.record(str(self._folder / name), _size_of(status))

    def add(self, reason: str, *paths: Path) -> None:
        """Move files here; count and log them as one. Never raises."""
        moved = [path for path in paths if self._move(path)]
        if moved:
            self._note(reason, moved[0])

    def add_copy(self, reason: str, path: Path, max_bytes: int) -> None:
        """Copy a file, which stays until replaced; move an irregular one."""
        try:
            data = self._files.read(path, max_bytes)
        except WrongFile:
            self.add(reason, path)
            return
        target = self._target(path)
        replace_file(self._files, target, data, "quarantine", lambda step: None)
        self._usage.record(str(target), len(data))
        self._note(reason, path)

    def files(self) -> list[tuple[str, str]]:
        """Paths and original names."""
        return [(path, os.path.basename(path).rpartition(".")[0]) for path in self._usage.paths(self._folder)]

    def has(self, *suffixes: str) -> bool:
        return any(name.endswith(suffixes) for _, name in self.files())

    def remove(self, is_meant: Callable[[str], bool]) -> None:
        for path, name in self.files():
            if is_meant(name):
                self._usage.remove(path)

    def empty(self) -> int:
        """Delete what can be deleted; return the bytes freed. Never raises."""
        before = self._usage.bytes_of(QUARANTINE)
        for path in self._usage.paths(self._folder):
            with suppress(OSError):
                self._usage.remove(path)
        return before - self._usage.bytes_of(QUARANTINE)

    def _target(self, path: Path) -> Path:
        self._files.make_folder(self._folder)
        return self._folder / f"{path.name}.{secrets.token_hex(6)}"

    def _move(self, path: Path) -> bool:
        try:
            target = self._target(path)
            self._files.rename(path, target)
            self._usage.record(str(target), _size_of(self._files.status(target)))
        except FileNotFoundError:
            self._usage.forget(path)
            return False
        except OSError as error:
            logger.error("cannot move %s to quarantine: %s", path, error)
        self._usage.forget(path)
        return True

    def _note(self, reason: str, path: Path) -> None:
        with self._lock:
            self.count += 1
        logger.warning("quarantined %s: %s", path.relative_to(self._files.root), reason)


def adopt_blocks(files: CacheFiles, usage: DiskUsage, parent: Path) -> None:
    """Record the block folders; quarantine links and irregular files."""
    for name, status in files.list_folder(parent):
        if stat.S_ISLNK(status.st_mode):
            usage.quarantine.add("it is a symbolic link", parent / name)
        elif stat.S_ISDIR(status.st_mode):
            files.make_folder(parent / name)
            for path in _adopt(files, usage, parent / name):
                usage.quarantine.add("it is not a regular file", path)


def adopt_agents(files: CacheFiles, usage: DiskUsage, parent: Path) -> tuple[list[Path], dict[str, str]]:
    """Record agent folders; return usable ones, and reasons for unusable ones. Quarantines nothing."""
    folders: list[Path] = []
    unavailable: dict[str, str] = {}
    for name, status in files.list_folder(parent):
        if not stat.S_ISDIR(status.st_mode) and not stat.S_ISLNK(status.st_mode):
            continue
        try:
            files.make_folder(parent / name)
            _adopt(files, usage, parent / name)
            folders.append(parent / name)
        except OSError as error:
            unavailable[name] = files.describe(parent / name, error)
    return folders, unavailable


def _adopt(files: CacheFiles, usage: DiskUsage, folder: Path) -> list[Path]:
    strange: list[Path] = []
    for name, status in files.list_folder(folder):
        path = f"{folder}/{name}"
        if not stat.S_ISREG(status.st_mode):
            strange.append(Path(path))
            usage.record(path, _size_of(status))
        elif name.endswith(TEMP_SUFFIX):
            with suppress(OSError):  # another user's
                files.remove(path)
        else:
            if status.st_mode & 0o077:
                with suppress(OSError):
                    files.tighten(path)
            usage.record(path, status.st_size)
    return strange


def _size_of(status: os.stat_result) -> int:
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_size
