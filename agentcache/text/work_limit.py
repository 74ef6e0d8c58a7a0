"""Limits the work on one prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentcache.errors import Overloaded


def _never() -> bool:
    return False


def _take_any(num_tokens: int) -> None:
    return None


@dataclass(frozen=True)
class WorkLimit:
    """Conditions that stop the work on a prompt.

    `refuse` raises the error for at least that many tokens; the working thread calls `has_ended`.
    """

    max_tokens: int | None = None
    refuse: Callable[[int], None] = _take_any
    has_ended: Callable[[], bool] = _never

    def check(self, at_least: int) -> None:
        """Refuse the prompt if `at_least`, a lower bound of its tokens, is too many."""
        if self.max_tokens is not None and at_least > self.max_tokens:
            self.refuse(at_least)

    def go_on(self) -> None:
        """Raise Overloaded if the request has ended."""
        if self.has_ended():
            raise Overloaded("the request has ended")


UNLIMITED = WorkLimit()
