"""Hidden-state cache: inputs of layer `cut` for base's blocks. Adapters that begin there skip lower layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentcache.api.stats import HIDDEN_STATES
from agentcache.blocks.keys import BASE_ORIGIN, BLOCK_SIZE
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.pool import BlockPool
from agentcache.blocks.radix_tree import Node
from agentcache.errors import BrokenInvariant


class HiddenStateKey(NamedTuple):
    """Base's chain key and the layer."""

    chain: str
    cut: int


@dataclass(frozen=True)
class Piece:
    """Tokens `start … stop - 1` of a step, at `offset` in a slot."""

    slot: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class HiddenStatePlan:
    """Hidden states that a row's step reads (for its first layer, `cut`) and writes, by layer."""

    cut: int = 0
    reads: Sequence[Piece] = ()
    writes: Mapping[int, Sequence[Piece]] = field(default_factory=dict)


class HiddenStateCache:
    """Slots by address, with a separate budget."""

    def __init__(self, num_slots: int, block_bytes: int, ledger: Ledger) -> None:
        self.num_slots = num_slots
        self._pool = BlockPool()
        self._block_bytes = block_bytes
        self._account = ledger.open(
            HIDDEN_STATES,
            apart=num_slots * block_bytes,
            used=lambda: (self._pool.capacity - self._pool.num_free) * block_bytes,
        )
        self._slots: dict[HiddenStateKey, int] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._slots)

    def match(self, names: Iterable[HiddenStateKey]) -> int:
        count = 0
        for name in names:
            if name not in self._slots:
                break
            count += 1
        return count

    def lock(self, names: Sequence[HiddenStateKey]) -> list[int]:
        """Pin cached blocks until `release`."""
        self.touch(names)
        slots = [self._slots[name] for name in names]
        for slot in slots:
            self._pool.retain(slot)
        return slots

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._pool.release(slot)

    def touch(self, names: Sequence[HiddenStateKey]) -> None:
        """Mark a path as just used, its last block as the oldest."""
        for name in reversed(names):
            if name in self._slots:
                self._slots[name] = self._slots.pop(name)

    def allocate(self, spare: Collection[HiddenStateKey] = ()) -> int | None:
        """Return a slot without evicting `spare`; None if all are in use."""
        if not self._pool.num_free and not self._grow() and not self._evict(spare):
            return None
        return self._pool.allocate()

    def _grow(self) -> bool:
        if self._pool.capacity == self.num_slots:
            return False
        self._account.claim(self._block_bytes)
        self._pool.grow(self._pool.capacity + 1)
        return True

    def _evict(self, spare: Collection[HiddenStateKey] = ()) -> bool:
        idle = (name for name, slot in self._slots.items() if self._pool.ref_cnt(slot) == 1)
        victim = next((name for name in idle if name not in spare), None)
        if victim is not None:
            self._pool.release(self._slots.pop(victim))
        return victim is not None

    def publish(self, name: HiddenStateKey, slot: int) -> None:
        """List a filled slot. The cache takes over, or drops, the caller's reference."""
        if name in self._slots:
            self._pool.release(slot)
        else:
            self._slots[name] = slot

    def clear(self) -> None:
        while self._evict():
            continue

    def give_back(self) -> int:
        """Evict unread blocks, drop last slots; return the capacity left."""
        self.clear()
        capacity = self._pool.last_in_use + 1
        self._account.release((self._pool.capacity - capacity) * self._block_bytes)
        self._pool.shrink(capacity)
        return capacity

    def check_integrity(self, held: Iterable[int]) -> None:
        self._pool.check_integrity()
        expected = Counter(self._slots.values()) + Counter(held)
        if Counter({slot: self._pool.ref_cnt(slot) for slot in range(self._pool.capacity)}) != expected:
            raise BrokenInvariant("reference counts of the hidden-state cache are wrong")
        if self._pool.capacity * self._block_bytes != self._account.claimed:
            raise BrokenInvariant("the hidden-state cache has other slots than it has claimed")


class HiddenStateReader:
    """A request's hidden states, from block number `first` on."""

    def __init__(self, first: int, slots: Sequence[int]) -> None:
        self.end = (first + len(slots)) * BLOCK_SIZE
        self.slots = list(slots)
        self._first = first

    def pieces(self, start: int, stop: int) -> list[Piece]:
        return [
            Piece(self.slots[block.position - self._first], block.offset, block.start, block.stop)
            for block in _blocks(start, stop)
        ]


class HiddenStateWriter:
    """Caches a request's hidden states at one layer, in whole blocks."""

    def __init__(self, cache: HiddenStateCache, cut: int) -> None:
        self._cache = cache
        self._cut = cut
        self._slots: dict[int, int] = {}  # by block number; complete before `_end`
        self._end = 0
        self._path: list[HiddenStateKey] = []

    @property
    def slots(self) -> list[int]:
        return list(self._slots.values())

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Allocate slots for a step's tokens. Blocks without their first tokens are not stored."""
        if start != self._end and (unfinished := self._slots.pop(self._end // BLOCK_SIZE, None)) is not None:
            self._cache.release([unfinished])
        self._end = stop
        return [piece for block in _blocks(start, stop) if (piece := self._piece(block)) is not None]

    def _piece(self, block: _Block) -> Piece | None:
        if block.offset == 0 and (slot := self._cache.allocate(self._path)) is not None:
            self._slots[block.position] = slot
        slot = self._slots.get(block.position)
        return None if slot is None else Piece(slot, block.offset, block.start, block.stop)

    def publish(self, nodes: Sequence[Node]) -> None:
        """List complete blocks. `nodes`: all of the request's."""
        for position in [position for position in self._slots if position < min(len(nodes), self._end // BLOCK_SIZE)]:
            slot, path = self._slots.pop(position), nodes[: position + 1]
            if path[-1].producer != BASE_ORIGIN:
                raise BrokenInvariant(f"{path[-1]!r} is not base's and has no hidden states")
            self._path = [HiddenStateKey(node.chain, self._cut) for node in path]
            self._cache.publish(self._path[-1], slot)
            self._cache.touch(self._path)


@dataclass(frozen=True)
class _Block:
    position: int
    offset: int
    start: int
    stop: int


def _blocks(start: int, stop: int) -> Iterator[_Block]:
    for position in range(start // BLOCK_SIZE, -(-stop // BLOCK_SIZE)):
        begin, end = max(start, position * BLOCK_SIZE), min(stop, (position + 1) * BLOCK_SIZE)
        yield _Block(position, begin % BLOCK_SIZE, begin - start, end - start)
