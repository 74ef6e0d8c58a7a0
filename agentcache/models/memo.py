"""Small files that remember what an earlier start has found out, so that later starts need not do so again."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentcache.plain_file import open_plain
from agentcache.private_file import write_private

_MAX_BYTES = 1 << 24  # a longer file is cut, and no JSON then


class Memo:
    """Texts by key, in one JSON file; without a file nothing is remembered. Threads may share it."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known = read_memo(file)
        self._new: dict[str, str] = {}

    def get(self, key: str, compute: Callable[[], str]) -> str:
        """The text under `key`; computed where the file has none."""
        text = self._known.get(key)
        if text is None:
            text = self._new[key] = compute()
        return text

    def keep(self) -> None:
        """Write what was computed, as well as the file allows."""
        if self._file is not None and self._new:
            write_memo(self._file, self._new | self._known)


def read_memo(memo: Path | None) -> dict[str, str]:
    """What is remembered; nothing where there is no such file, or none that can be read."""
    try:
        known: Any = json.loads(_read(memo)) if memo else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str)} if isinstance(known, dict) else {}


def _read(memo: Path) -> bytes:
    with open(open_plain(memo), "rb") as stream:
        return stream.read(_MAX_BYTES)


def write_memo(memo: Path, known: dict[str, str]) -> None:
    """Best effort: without it the next start finds out once more."""
    with suppress(OSError):
        write_private(memo, json.dumps(known).encode())
