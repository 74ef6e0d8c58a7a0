"""A small file of what an earlier start has found out and a later one need not find out again."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentcache.private_file import write_private


def read_memo(memo: Path | None) -> dict[str, str]:
    """What is remembered; nothing where there is no such file, or none that can be read."""
    try:
        known: Any = json.loads(memo.read_text(encoding="utf-8")) if memo else {}
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str)} if isinstance(known, dict) else {}


def write_memo(memo: Path, known: dict[str, str]) -> None:
    """Best effort: without it the next start finds out once more."""
    with suppress(OSError):
        write_private(memo, json.dumps(known).encode())
