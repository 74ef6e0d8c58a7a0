"""Reference counts of the block slots of one cache group, and the table of slots a sequence reads from.

A slot is `free` (no reference), or referenced by the radix tree, by sequences, or by both. A slot that only the tree
references is cached: it can be evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentcache.errors import BrokenInvariant, OutOfBlocks


class BlockPool:
    """Slots `0 … capacity-1` of one group's arena. Plain counting: what lies in a slot is the arena's business."""

    def __init__(self, capacity: int = 0) -> None:
        self._ref_cnt: list[int] = []
        self._free: list[int] = []
        self._moves: list[tuple[int, int]] = []
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        return len(self._ref_cnt)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, capacity: int) -> None:
        """Add slots up to `capacity`."""
        added = range(len(self._ref_cnt), capacity)
        self._ref_cnt.extend(0 for _ in added)
        self._free.extend(reversed(added))

    @property
    def last_in_use(self) -> int:
        """The last slot that has a reference; -1 where none has."""
        return next((slot for slot in range(self.capacity - 1, -1, -1) if self._ref_cnt[slot]), -1)

    def shrink(self, capacity: int) -> None:
        """Drop the slots from `capacity` on, all of which must be free."""
        if any(self._ref_cnt[capacity:]):
            raise BrokenInvariant("a slot in use cannot be dropped")
        del self._ref_cnt[capacity:]
        self._free = [block_id for block_id in self._free if block_id < capacity]

    def allocate(self) -> int:
        """A free slot, with one reference. Raises OutOfBlocks."""
        if not self._free:
            raise OutOfBlocks(f"all {self.capacity} blocks are in use")
        block_id = self._free.pop()
        self._ref_cnt[block_id] = 1
        return block_id

    def allocate_before(self, block_id: int) -> int | None:
        """The first free slot, with one reference, if it lies before `block_id`."""
        first = min(self._free, default=block_id)
        if first >= block_id:
            return None
        self._free.remove(first)
        self._ref_cnt[first] = 1
        return first

    def note_move(self, source: int, target: int) -> None:
        """What lay in slot `source` is in `target` from now on; its bytes have still to follow."""
        self._moves.append((source, target))

    def take_moves(self) -> list[tuple[int, int]]:
        """Sources and targets, in order, of the moves since the last call.

        They are due before anything else is written, read or given back in the arena.
        """
        moves, self._moves = self._moves, []
        return moves

    def retain(self, block_id: int) -> None:
        """One more reference to a slot in use."""
        if self._ref_cnt[block_id] < 1:
            raise BrokenInvariant(f"block {block_id} is free and cannot be retained")
        self._ref_cnt[block_id] += 1

    def release(self, block_id: int) -> None:
        """One reference less; the slot is free when none is left."""
        if self._ref_cnt[block_id] < 1:
            raise BrokenInvariant(f"block {block_id} is released once too often")
        self._ref_cnt[block_id] -= 1
        if self._ref_cnt[block_id] == 0:
            self._free.append(block_id)

    def ref_cnt(self, block_id: int) -> int:
        return self._ref_cnt[block_id]

    def check_integrity(self) -> None:
        """Raise BrokenInvariant unless the free list is exactly the slots without references."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise BrokenInvariant("a block is twice in the free list")
        if free != {block_id for block_id, count in enumerate(self._ref_cnt) if count == 0}:
            raise BrokenInvariant("free list and reference counts disagree")


@dataclass
class BlockTable:
    """Where one sequence's tokens lie in one group: block `i` holds tokens `256*i … 256*i+255`.

    Append-only at the end; blocks that fell out of the window are dropped at the front, so that
    `block_ids[0]` is block number `first_block`.
    """

    block_ids: list[int] = field(default_factory=list)
    first_block: int = 0

    @property
    def end_block(self) -> int:
        """Number of the block after the last one."""
        return self.first_block + len(self.block_ids)

    def has(self, position: int) -> bool:
        """Whether block number `position` is in the table."""
        return self.first_block <= position < self.end_block

    def block_id(self, position: int) -> int:
        """Slot of block number `position`."""
        return self.block_ids[position - self.first_block]

    def replace(self, position: int, block_id: int) -> None:
        self.block_ids[position - self.first_block] = block_id

    def drop_before(self, position: int) -> list[int]:
        """Drop the blocks before number `position` and return their slots."""
        count = min(max(0, position - self.first_block), len(self.block_ids))
        dropped = self.block_ids[:count]
        del self.block_ids[:count]
        self.first_block += count
        return dropped
