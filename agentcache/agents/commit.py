"""What of a turn has to be on disk, cache by cache, and what of it is not there yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentcache.agents.caches import KeptCache
from agentcache.agents.disk import Committed
from agentcache.blocks.keys import BlockName
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.sequence import LaneBlock
from agentcache.store.manifest import AgentRecord


@dataclass(frozen=True)
class BlockToWrite:
    """One group's file of a node, and the slot its bytes are in."""

    cache: KeptCache
    node: Node
    group: int
    block_id: int

    @property
    def name(self) -> BlockName:
        return BlockName(self.node.chain, self.group, self.cache.name)

    @property
    def num_bytes(self) -> int:
        return self.cache.prefix.all_groups[self.group].bytes_per_block


@dataclass(frozen=True)
class CachePart:
    """What a turn has in one cache: the blocks of its first `num_tokens` tokens."""

    cache: KeptCache
    blocks: Sequence[LaneBlock]
    num_tokens: int

    @property
    def needed(self) -> list[tuple[Node, BlockName]]:
        """What has to be on disk: as far as it will be attended to."""
        # A partly filled block before the last one ends where an adapter begins. It is for other conversations that go
        # on from there; this one reads the adapter's block, which has the same tokens.
        groups = self.cache.prefix.groups
        return [
            (block.node, BlockName(block.node.chain, index, self.cache.name))
            for block in self.blocks
            if block.node.is_full or block.node.end == self.num_tokens
            for index in block.groups
            if block.node.position >= groups[index].first_block_needed(self.num_tokens)
        ]

    @property
    def targets(self) -> list[BlockToWrite]:
        """What RAM has of it and the disk has not."""
        return [
            BlockToWrite(self.cache, block.node, index, block.node.block_ids[index])
            for block in self.blocks
            for index in block.groups
            if index in block.node.block_ids and is_wanted(block.node, index)
        ]


@dataclass
class Commit:
    """A turn on its way to the disk.

    Attributes:
        parts: base's, and that of an adapter's residuals, if there are any.
        num_bytes: written by earlier tries.
        tries: begun so far.
    """

    record: AgentRecord
    parts: list[CachePart]
    held: Sequence[BlockName]
    done: Callable[[Committed], None]
    num_bytes: int = 0
    tries: int = 0


def is_wanted(node: Node, index: int) -> bool:
    """Whether the node's file of a group is neither on disk nor on its way there."""
    return index not in node.stored and index not in node.pending
