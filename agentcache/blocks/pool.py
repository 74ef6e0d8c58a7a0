from __future__ import annotations

from dataclasses import dataclass, field

from agentcache.errors import BrokenInvariant, OutOfBlocks


class BlockPool:
    """Reference counts of one group's slots `0 … capacity-1`.

    The radix tree and requests reference slots. A slot that only the tree references can be evicted.
    """

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
        added = range(len(self._ref_cnt), capacity)
        self._ref_cnt.extend(0 for _ in added)
        self._free.extend(reversed(added))

    @property
    def last_in_use(self) -> int:
        """The last referenced slot, or -1."""
        return next((slot for slot in range(self.capacity - 1, -1, -1) if self._ref_cnt[slot]), -1)

    def shrink(self, capacity: int) -> None:
        if any(self._ref_cnt[capacity:]):
            raise BrokenInvariant("a slot in use cannot be dropped")
        del self._ref_cnt[capacity:]
        self._free = [block_id for block_id in self._free if block_id < capacity]

    def allocate(self) -> int:
        """Return a free slot, with one reference."""
        if not self._free:
            raise OutOfBlocks(f"all {self.capacity} blocks are in use")
        block_id = self._free.pop()
        self._ref_cnt[block_id] = 1
        return block_id

    def allocate_before(self, block_id: int) -> int | None:
        """Return the first free slot if below `block_id`, with one reference."""
        first = min(self._free, default=block_id)
        if first >= block_id:
            return None
        self._free.remove(first)
        self._ref_cnt[first] = 1
        return first

    def note_move(self, source: int, target: int) -> None:
        """Record that `target` replaces `source`; bytes follow later."""
        self._moves.append((source, target))

    def take_moves(self) -> list[tuple[int, int]]:
        """Return and clear the recorded moves. Copy the bytes before any other use of the arena."""
        moves, self._moves = self._moves, []
        return moves

    def retain(self, block_id: int) -> None:
        if self._ref_cnt[block_id] < 1:
            raise BrokenInvariant(f"block {block_id} is free and cannot be retained")
        self._ref_cnt[block_id] += 1

    def release(self, block_id: int) -> None:
        if self._ref_cnt[block_id] < 1:
            raise BrokenInvariant(f"block {block_id} is released once too often")
        self._ref_cnt[block_id] -= 1
        if self._ref_cnt[block_id] == 0:
            self._free.append(block_id)

    def ref_cnt(self, block_id: int) -> int:
        return self._ref_cnt[block_id]

    def check_integrity(self) -> None:
        free = set(self._free)
        if len(free) != len(self._free):
            raise BrokenInvariant("a block is twice in the free list")
        if free != {block_id for block_id, count in enumerate(self._ref_cnt) if count == 0}:
            raise BrokenInvariant("free list and reference counts disagree")


@dataclass
class BlockTable:
    """One request's slots in one group: block `i` holds tokens `256*i … 256*i+255`.

    Blocks that leave the window are dropped: `block_ids[0]` is block number `first_block`.
    """

    block_ids: list[int] = field(default_factory=list)
    first_block: int = 0

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.block_ids)

    def has(self, position: int) -> bool:
        return self.first_block <= position < self.end_block

    def block_id(self, position: int) -> int:
        return self.block_ids[position - self.first_block]

    def replace(self, position: int, block_id: int) -> None:
        self.block_ids[position - self.first_block] = block_id

    def drop_before(self, position: int) -> list[int]:
        count = min(max(0, position - self.first_block), len(self.block_ids))
        dropped = self.block_ids[:count]
        del self.block_ids[:count]
        self.first_block += count
        return dropped
