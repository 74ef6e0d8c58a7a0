"""Small JSON files that keep results for later starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentcache.system.files import open_plain, write_private

_MAX_BYTES = 1 << 24  # a longer file is cut, so invalid JSON


class Memo:
    """Texts by key in one file, or in memory without a file. Threads may share it."""

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
    """Contents of a memo file; empty if missing or unreadable."""
    try:
        known: Any = json.loads(_read(memo)) if memo else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str)} if isinstance(known, dict) else {}


def _read(memo: Path) -> bytes:
    with open(open_plain(memo), "rb") as stream:
        return stream.read(_MAX_BYTES)


def write_memo(memo: Path, known: dict[str, str]) -> None:
    """Write a memo file, best effort: without it the next start computes again."""
    with suppress(OSError):
        write_private(memo, json.dumps(known).encode())
