"""What differs in groups that hold open blocks only.

Their tables begin with the open block. A step gets a slot there for each block that it reaches, and seals those that it
fills; `PrefixCache.leave_window` releases them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import Group, Holds, full_partner
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.snapshots import whole_blocks


class OpenBlocks:
    """The groups of one cache that hold open blocks only, if there are any."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = {index for index, group in enumerate(groups) if group.holds is Holds.OPEN}

    def __contains__(self, index: int) -> bool:
        return index in self._groups

    def keepable(self, sequence: BlockTables, num_tokens: int) -> int:
        """Tokens that can be kept of the first `num_tokens`: without a part of a sealed block.

        In RAM, such a part is reopened from the full block.
        """
        is_sealed = num_tokens // BLOCK_SIZE < sequence.num_tokens // BLOCK_SIZE
        return whole_blocks(num_tokens) if self._groups and is_sealed else num_tokens

    def source_group(self, node: Node, index: int) -> int:
        """Group that has the node's data if group `index` needs a part of the block."""
        return full_partner(index) if node.is_full and index in self._groups else index
