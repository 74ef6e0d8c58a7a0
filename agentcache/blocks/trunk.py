"""Which hidden states are cached: the trunk that base and all adapters which begin at the same layer have in common.

Below the first layer that an adapter changes, everything is base's. A block of the trunk is the input of layer `cut`
for the 256 tokens of a block of base's. Whoever has base's keys and values below the cut, and the trunk, need not
compute the lower layers again. Who holds references to a slot:

    trunk       one for each block that it lists
    sequence    one for each slot that it reads (`TrunkReader`) or fills (`TrunkFiller`)

Nothing is ever missed: a block that is not there is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentcache.blocks.keys import BASE_PRODUCER, BLOCK_SIZE
from agentcache.blocks.ledger import TRUNK, Ledger
from agentcache.blocks.pool import BlockPool
from agentcache.blocks.radix_tree import Node
from agentcache.errors import BrokenInvariant


class TrunkName(NamedTuple):
    """The input of layer `cut` for the tokens of base's block at `chain`."""

    chain: str
    cut: int


@dataclass(frozen=True)
class Piece:
    """Tokens `start … stop - 1` of a step, which lie in a slot from its position `offset` on."""

    slot: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class TrunkPlan:
    """What a step of one row takes from the trunk and gives to it.

    Args:
        cut: first layer that is computed; with one above 0, `reads` are its input.
        writes: where the inputs of layers go, by layer.
    """

    cut: int = 0
    reads: Sequence[Piece] = ()
    writes: Mapping[int, Sequence[Piece]] = field(default_factory=dict)


class TrunkCache:
    """Slots for blocks of hidden states under a budget of their own, emptied least recently used first.

    Args:
        num_slots: how many there may be; memory is claimed for one when it is first needed, and kept.
        block_bytes: of each.
    """

    def __init__(self, num_slots: int, block_bytes: int, ledger: Ledger) -> None:
        self.num_slots = num_slots
        self._pool = BlockPool()
        self._block_bytes = block_bytes
        self._account = ledger.open(
            TRUNK,
            apart=num_slots * block_bytes,
            used=lambda: (self._pool.capacity - self._pool.num_free) * block_bytes,
        )
        self._slots: dict[TrunkName, int] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._slots)

    def match(self, names: Iterable[TrunkName]) -> int:
        """How many of the first names are cached without a gap. Changes nothing."""
        count = 0
        for name in names:
            if name not in self._slots:
                break
            count += 1
        return count

    def lock(self, names: Sequence[TrunkName]) -> list[int]:
        """The slots of cached blocks, which stay until they are released; the blocks count as just used."""
        self.touch(names)
        slots = [self._slots[name] for name in names]
        for slot in slots:
            self._pool.retain(slot)
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Let go of slots that were locked or allocated."""
        for slot in slots:
            self._pool.release(slot)

    def touch(self, names: Sequence[TrunkName]) -> None:
        """Mark a path as just used; a block counts as older than the one before, without which it is of no use."""
        for name in reversed(names):
            if name in self._slots:
                self._slots[name] = self._slots.pop(name)

    def allocate(self, spare: Collection[TrunkName] = ()) -> int | None:
        """A slot to fill, with one reference, in place of the block used longest ago; None if all are being used.

        Args:
            spare: the blocks in front, without which the new one would be of no use.
        """
        if not self._pool.num_free and not self._grow() and not self._evict(spare):
            return None
        return self._pool.allocate()

    def _grow(self) -> bool:
        if self._pool.capacity == self.num_slots:
            return False
        self._account.claim(self._block_bytes)
        self._pool.grow(self._pool.capacity + 1)
        return True

    def _evict(self, spare: Collection[TrunkName] = ()) -> bool:
        idle = (name for name, slot in self._slots.items() if self._pool.ref_cnt(slot) == 1)
        victim = next((name for name in idle if name not in spare), None)
        if victim is not None:
            self._pool.release(self._slots.pop(victim))
        return victim is not None

    def publish(self, name: TrunkName, slot: int) -> None:
        """A slot has been filled: the caller's reference becomes the trunk's, unless that has the block already."""
        if name in self._slots:
            self._pool.release(slot)
        else:
            self._slots[name] = slot

    def clear(self) -> None:
        """Evict every block that nobody reads."""
        while self._evict():
            continue

    def give_back(self) -> int:
        """Evict what nobody reads and have no slots behind the last one that is in use; returns how many are left."""
        self.clear()
        capacity = self._pool.last_in_use + 1
        self._account.release((self._pool.capacity - capacity) * self._block_bytes)
        self._pool.shrink(capacity)
        return capacity

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise BrokenInvariant unless all references are the trunk's own and those of `held`."""
        self._pool.check_integrity()
        expected = Counter(self._slots.values()) + Counter(held)
        if Counter({slot: self._pool.ref_cnt(slot) for slot in range(self._pool.capacity)}) != expected:
            raise BrokenInvariant("reference counts of the trunk are wrong")
        if self._pool.capacity * self._block_bytes != self._account.claimed:
            raise BrokenInvariant("the trunk has other slots than it has claimed")


class TrunkReader:
    """A sequence's blocks of the trunk: its tokens before `end` need computing from the blocks' layer on only.

    Args:
        first: number of the first block.
        slots: locked ones of the blocks from there on.
    """

    def __init__(self, first: int, slots: Sequence[int]) -> None:
        self.end = (first + len(slots)) * BLOCK_SIZE
        self.slots = list(slots)
        self._first = first

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Where the tokens of a step lie."""
        return [
            Piece(self.slots[block.position - self._first], block.offset, block.start, block.stop)
            for block in _blocks(start, stop)
        ]


class TrunkFiller:
    """What a sequence adds to the trunk at one layer: whole blocks, of tokens that are computed one after the other."""

    def __init__(self, cache: TrunkCache, cut: int) -> None:
        self._cache = cache
        self._cut = cut
        self._slots: dict[int, int] = {}  # by number of the block, those in front of `_end` in full
        self._end = 0
        self._path: list[TrunkName] = []

    @property
    def slots(self) -> list[int]:
        return list(self._slots.values())

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Where the tokens of a step are to go; those of a block whose beginning is missing go nowhere."""
        if start != self._end:
            self._drop(self._end // BLOCK_SIZE)
        self._end = stop
        return [piece for block in _blocks(start, stop) if (piece := self._piece(block)) is not None]

    def _drop(self, position: int) -> None:
        if position in self._slots:
            self._cache.release([self._slots.pop(position)])

    def _piece(self, block: _Block) -> Piece | None:
        if block.offset == 0 and (slot := self._cache.allocate(self._path)) is not None:
            self._slots[block.position] = slot
        slot = self._slots.get(block.position)
        return None if slot is None else Piece(slot, block.offset, block.start, block.stop)

    def publish(self, nodes: Sequence[Node]) -> None:
        """Give the trunk the blocks that are done: `nodes` are the sequence's, from its start on."""
        for position in [position for position in self._slots if position < min(len(nodes), self._end // BLOCK_SIZE)]:
            slot, path = self._slots.pop(position), nodes[: position + 1]
            if path[-1].producer != BASE_PRODUCER:
                raise BrokenInvariant(f"{path[-1]!r} is not base's and cannot be of the trunk")
            self._path = [TrunkName(node.chain, self._cut) for node in path]
            self._cache.publish(self._path[-1], slot)
            self._cache.touch(self._path)


@dataclass(frozen=True)
class _Block:
    """Tokens `start … stop - 1` of a step: those of block number `position`, from its position `offset` on."""

    position: int
    offset: int
    start: int
    stop: int


def _blocks(start: int, stop: int) -> Iterator[_Block]:
    """The blocks of a step that computes tokens `start … stop - 1`."""
    for position in range(start // BLOCK_SIZE, -(-stop // BLOCK_SIZE)):
        begin, end = max(start, position * BLOCK_SIZE), min(stop, (position + 1) * BLOCK_SIZE)
        yield _Block(position, begin % BLOCK_SIZE, begin - start, end - start)
