"""What differs in groups that hold open blocks only.

Their tables have slots for block 0, while it is within the window of their layers, and for the open block. A step gets
one for each block that it reaches, and seals those that it fills; `PrefixCache.leave_window` releases them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED, is_sealed
from agentcache.blocks.pool import Group, Holds, full_partner, window_group
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.snapshots import whole_blocks


class OpenBlocks:
    """The groups of one cache that hold open blocks only, if there are any."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = {
            index: window_group(groups, index) for index, group in enumerate(groups) if group.holds is Holds.OPEN
        }

    def __contains__(self, index: int) -> bool:
        return index in self._groups

    def keepable(self, sequence: BlockTables, num_tokens: int) -> int:
        """Tokens that can be kept of the first `num_tokens`: without a part of a sealed block.

        In RAM, such a part is reopened from the sealed block.
        """
        position = num_tokens // BLOCK_SIZE
        tokens_there = min(BLOCK_SIZE, sequence.num_tokens - position * BLOCK_SIZE)
        return whole_blocks(num_tokens) if self._groups and is_sealed(position, tokens_there) else num_tokens

    def source_group(self, node: Node, index: int) -> int:
        """Group that has the node's data if group `index` needs a part of the block."""
        return full_partner(index) if node.is_sealed and index in self._groups else index

    def keeps_first(self, index: int, read_from: int) -> bool:
        """Whether group `index` has block 0 for tokens from `read_from` on."""
        return index in self._groups and self._groups[index].first_block_needed(read_from) < FIRST_SEALED
