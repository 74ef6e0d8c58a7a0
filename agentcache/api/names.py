"""Names of agents and adapters: safe in URLs and file names, never paths."""

from __future__ import annotations

import re

RULE = "1 to 64 of A-Z a-z 0-9 . _ -"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def is_name(text: str) -> bool:
    """Whether `text` follows `RULE`, and is neither "." nor ".."."""
    return _NAME.fullmatch(text) is not None and text not in (".", "..")
