"""Safe opening of files, private files, and memos for later starts."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def open_plain(path: Path) -> int:
    """Open a regular file for reading, following links; never a pipe or device. Raises OSError, ValueError."""
    _require_regular(os.stat(path))
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(fd))  # it may have been replaced
    except ValueError:
        os.close(fd)
        raise
    return fd


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a file")


def make_private_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents; return the new ones, `folder` first. Raises OSError."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(0o700, parents=True, exist_ok=True)
    for each in reversed(new):
        fd = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            give_to_owner(fd, each.parent)
        finally:
            os.close(fd)
    return new


def give_to_owner(fd: int, folder: Path) -> None:
    """As root, give the new `fd` to the owner of `folder`."""
    if os.geteuid() == 0:
        owner = os.stat(folder)
        with suppress(OSError):  # some file systems have no owners
            os.fchown(fd, owner.st_uid, owner.st_gid)


def write_private(path: Path, data: bytes) -> None:
    """Replace the file at `path`, readable by its owner only. Raises OSError, the old file then unchanged.

    Not synced: a power loss may leave a torn file, so readers must check the content.
    """
    temporary = path.with_suffix(f".{secrets.token_hex(6)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def file_identity(file: Path) -> str:
    """Path, size, times and inode, which change if the content may have changed."""
    stat = file.stat()
    return f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"


_MAX_BYTES = 1 << 24  # a longer file is cut, so invalid JSON


class Memo:
    """Texts by key, in a file if given. Threads may share it."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known = read_memo(file)
        self._new: dict[str, str] = {}

    def get(self, key: str, compute: Callable[[], str]) -> str:
        text = self._known.get(key)
        if text is None:
            text = self._new[key] = compute()
        return text

    def keep(self) -> None:
        if self._file is not None and self._new:
            write_memo(self._file, self._new | self._known)


def read_memo(memo: Path | None) -> dict[str, str]:
    """Contents of a memo file; empty if unreadable."""
    try:
        known: Any = json.loads(_read(memo)) if memo else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str)} if isinstance(known, dict) else {}


def _read(memo: Path) -> bytes:
    with open(open_plain(memo), "rb") as stream:
        return stream.read(_MAX_BYTES)


def write_memo(memo: Path, known: dict[str, str]) -> None:
    """Write a memo file, best effort."""
    with suppress(OSError):
        write_private(memo, json.dumps(known).encode())
