"""Blocks with the same parent, by exact tokens or longest common prefix."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

BYTES_PER_TOKEN = 4
_NEIGHBOURS = 8  # candidates with equal prefixes


def pack(token_ids: Sequence[int]) -> bytes:
    """Encode as big-endian uint32, so that bytes sort like tokens."""
    packed = array("I", token_ids)
    packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> array[int]:
    token_ids = array("I", packed)
    token_ids.byteswap()
    return token_ids


def _common_tokens(left: bytes, right: bytes) -> int:
    low, high = 0, min(len(left), len(right)) // BYTES_PER_TOKEN
    while low < high:
        middle = (low + high + 1) // 2
        span = slice(low * BYTES_PER_TOKEN, middle * BYTES_PER_TOKEN)
        if left[span] == right[span]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Nearest(Generic[T]):
    """Items with equally many common tokens; 0 without items."""

    items: list[T]
    num_tokens: int


class Siblings(Generic[T]):
    """Items by packed token ids."""

    __slots__ = ("_items", "_order")

    def __init__(self) -> None:
        self._items: dict[bytes, T] = {}
        self._order: list[bytes] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    @property
    def is_sorted(self) -> bool:
        return self._order == sorted(self._items)

    def get(self, packed: bytes) -> T | None:
        return self._items.get(packed)

    def add(self, packed: bytes, item: T) -> None:
        self._items[packed] = item
        insort(self._order, packed)

    def remove(self, packed: bytes) -> None:
        del self._items[packed]
        del self._order[bisect_left(self._order, packed)]

    def nearest(self, packed: bytes, usable: Callable[[T], bool], least: int) -> Nearest[T]:
        start = bisect_left(self._order, packed)
        best: list[T] = []
        for indices in (range(start, len(self._order)), range(start - 1, -1, -1)):
            taken = 0  # common prefixes only get shorter
            for index in indices:
                item = self._items[self._order[index]]
                if not usable(item):
                    continue
                shared = _common_tokens(self._order[index], packed)
                if shared < least or taken == _NEIGHBOURS:
                    break
                if shared > least:
                    best.clear()
                    least = shared
                best.append(item)
                taken += 1
        return Nearest(best, least if best else 0)
