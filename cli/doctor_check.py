"""One finding of `agentcache doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """`ok` is False if the finding prevents agentcache from working. `data` is structured."""

    name: str
    ok: bool
    detail: str
    data: Any = None
