"""Which changes of folders a power cut could still take back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Folder = tuple[int, int]  # device and inode: the same folder, by whatever path or descriptor it was reached
Name = str | Path


@dataclass
class DiskWatch:
    """Follows the real calls that change folders, and those that flush them.

    Attributes:
        changed: names that were made, renamed or removed since their folder was last flushed, each with its folder.
        made: names of all folders made so far.
        removed: each file removed so far, with the names that were volatile just before.
    """

    changed: set[tuple[str, Folder]] = field(default_factory=set)
    made: set[str] = field(default_factory=set)
    removed: list[tuple[str, frozenset[str]]] = field(default_factory=list)

    @property
    def volatile(self) -> set[str]:
        """The names that a power cut could still bring back or take away."""
        return {name for name, _ in self.changed}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        real = {name: getattr(os, name) for name in ("mkdir", "rename", "replace", "unlink", "remove", "fsync")}

        def mkdir(path: Name, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            real["mkdir"](path, mode, dir_fd=dir_fd)
            self._change(path, dir_fd)
            self.made.add(Path(path).name)

        def moving(move: str) -> Any:
            def call(
                source: Name, target: Name, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
            ) -> None:
                real[move](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                self._change(source, src_dir_fd)
                self._change(target, dst_dir_fd)

            return call

        def removing(remove: str) -> Any:
            def call(path: Name, *, dir_fd: int | None = None) -> None:
                before = frozenset(self.volatile)
                real[remove](path, dir_fd=dir_fd)
                self.removed.append((Path(path).name, before))
                self._change(path, dir_fd)

            return call

        def fsync(fd: int) -> None:
            real["fsync"](fd)
            flushed = _identity(os.fstat(fd))
            self.changed = {(name, folder) for name, folder in self.changed if folder != flushed}

        spies = {"mkdir": mkdir, "fsync": fsync}
        spies |= {name: moving(name) for name in ("rename", "replace")}
        spies |= {name: removing(name) for name in ("unlink", "remove")}
        for name, spy in spies.items():
            patch.setattr(os, name, spy)

    def forget(self) -> None:
        """Watch only what comes from here on."""
        self.changed, self.made, self.removed = set(), set(), []

    def _change(self, path: Name, dir_fd: int | None) -> None:
        status = os.stat(Path(path).parent) if dir_fd is None else os.fstat(dir_fd)
        self.changed.add((Path(path).name, _identity(status)))


def _identity(status: os.stat_result) -> Folder:
    return status.st_dev, status.st_ino
