"""Slots of open blocks, in groups that do not hold full ones.

A table has slots for the block that is open, and for those after it that a step reaches: the step seals the blocks that
it fills.
"""

from __future__ import annotations

from agentcache.blocks.allocator import BlockAllocator
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable, Holds, full_partner
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.snapshots import whole_blocks


class OpenBlocks:
    """The groups of one cache that hold open blocks only, if there are any."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._pools = allocator.slots.pools
        self._groups = {i for i, group in enumerate(allocator.slots.groups) if group.holds is Holds.OPEN}

    def __contains__(self, index: int) -> bool:
        return index in self._groups

    def reserve(self, index: int, table: BlockTable, num_tokens: int, end: int) -> None:
        """Allocate slots for the blocks from token `num_tokens` to block `end` - 1. Raises OutOfBlocks."""
        table.block_ids += [-1] * (end - table.end_block)
        for position in range(max(table.first_block, num_tokens // BLOCK_SIZE), end):
            if not table.has_slot(position):
                table.replace(position, self._allocator.allocate(index))

    def leave(self, index: int, table: BlockTable, num_tokens: int, needed: int) -> None:
        """Release slots of sealed blocks; drop blocks before `needed`."""
        for block_id in table.vacate_before(num_tokens // BLOCK_SIZE):
            self._pools[index].release(block_id)
        table.drop_before(needed)

    def keepable(self, sequence: BlockTables, num_tokens: int) -> int:
        """Tokens that can be kept of the first `num_tokens`: without a part of a sealed block.

        In RAM, such a part is reopened from the full block.
        """
        is_sealed = num_tokens // BLOCK_SIZE < sequence.num_tokens // BLOCK_SIZE
        return whole_blocks(num_tokens) if self._groups and is_sealed else num_tokens

    def source_group(self, node: Node, index: int) -> int:
        """Group that has the node's data if group `index` needs a part of the block."""
        return full_partner(index) if node.is_full and index in self._groups else index
