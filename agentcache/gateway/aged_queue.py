"""A queue in which small items go first, and large ones do not wait for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Entry(Generic[T]):
    """An item, and the cost of all later items that were taken before it."""

    item: T
    cost: int
    overtaken: int = 0


class AgedQueue(Generic[T]):
    """Items ordered by cost, until later ones that went first have cost as much as the item itself: then it is next.

    So the later items that go before one cost less than twice as much as it does. Of overdue items the oldest goes
    first. Belongs to one thread at a time.

    Args:
        patience: the least cost of later ones at which an item is next.
    """

    def __init__(self, patience: int = 0) -> None:
        self._patience = patience
        self._entries: list[_Entry[T]] = []  # as they came

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """All items, as they came."""
        return (entry.item for entry in self._entries)

    def push(self, item: T, cost: int) -> None:
        """Add an item; its cost is above 0."""
        self._entries.append(_Entry(item, cost))

    def take(self, may_go: Callable[[T], bool]) -> T | None:
        """Remove and return the first item that may go; None if there is none. O(items)."""
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
        """Remove the items that are void."""
        self._entries = [entry for entry in self._entries if not is_void(entry.item)]

    def clear(self) -> None:
        """Remove all items."""
        self._entries.clear()
