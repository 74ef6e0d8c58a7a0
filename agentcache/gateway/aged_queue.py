"""A priority queue in which large items cannot starve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Entry(Generic[T]):
    item: T
    cost: int
    overtaken: int = 0


class AgedQueue(Generic[T]):
    """Yields the cheapest item, or the oldest overdue one. Belongs to one thread at a time.

    An item is overdue once later items taken before it cost as much as itself. So their cost stays below twice its own.

    Args:
        patience: minimum cost of such items before an item is overdue.
    """

    def __init__(self, patience: int = 0) -> None:
        self._patience = patience
        self._entries: list[_Entry[T]] = []  # in order of arrival

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries)

    def push(self, item: T, cost: int) -> None:
        """Add an item. `cost` must be above 0."""
        self._entries.append(_Entry(item, cost))

    def take(self, may_go: Callable[[T], bool]) -> T | None:
        """Remove and return the next item that may go, or None. O(n)."""
        candidates = [entry for entry in self._entries if may_go(entry.item)]
        if not candidates:
            return None
        overdue = (entry for entry in candidates if entry.overtaken >= max(entry.cost, self._patience))
        taken = next(overdue, None) or min(candidates, key=lambda entry: entry.cost)
        index = self._entries.index(taken)
        for entry in self._entries[:index]:
            entry.overtaken += taken.cost
        del self._entries[index]
        return taken.item

    def drop(self, is_void: Callable[[T], bool]) -> None:
        self._entries = [entry for entry in self._entries if not is_void(entry.item)]

    def clear(self) -> None:
        self._entries.clear()
