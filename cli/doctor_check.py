"""One finding of `agentcache doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """A finding; `ok` is False if it prevents agentcache from working. `data` is structured."""

    name: str
    ok: bool
    detail: str
    data: Any = None
