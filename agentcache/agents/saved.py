from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """Bytes written, or the error."""

    written_bytes: int = 0
    error: str | None = None


def when_all(count: int, done: Callable[[Saved], None]) -> Callable[[Saved], None]:
    """Combine `count` outcomes into one."""
    outcomes: list[Saved] = []

    def take(saved: Saved) -> None:
        outcomes.append(saved)
        if len(outcomes) == count:
            error = next((each.error for each in outcomes if each.error is not None), None)
            done(Saved(sum(each.written_bytes for each in outcomes), error))

    return take
