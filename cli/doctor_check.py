"""One finding of `agentcache doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One finding. `ok` is False where something keeps agentcache from working.

    Args:
        data: the same for programs, where there are numbers.
    """

    name: str
    ok: bool
    detail: str
    data: Any = None
