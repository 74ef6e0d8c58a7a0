"""How much work a prompt is worth."""

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
    """How far to go with a prompt before it is refused; without arguments, all the way.

    Args:
        max_tokens: what a prompt may have; None for no limit.
        refuse: raises what a prompt gets that has at least so many tokens, and more than `max_tokens`.
        has_ended: whether nobody waits for the result any more. Called from the thread that works.
    """

    max_tokens: int | None = None
    refuse: Callable[[int], None] = _take_any
    has_ended: Callable[[], bool] = _never

    def check(self, at_least: int) -> None:
        """Refuse a prompt that has at least so many tokens, if those are too many."""
        if self.max_tokens is not None and at_least > self.max_tokens:
            self.refuse(at_least)

    def go_on(self) -> None:
        """Raises Overloaded if nobody waits for the result."""
        if self.has_ended():
            raise Overloaded("the request has ended")


UNLIMITED = WorkLimit()
