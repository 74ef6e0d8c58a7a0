"""Blocks that a turn needs on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentcache.agents.caches import KeptCache
from agentcache.agents.disk import Committed
from agentcache.blocks.block_tables import PathBlock
from agentcache.blocks.keys import BlockName
from agentcache.blocks.radix_tree import Node
from agentcache.store.manifest import AgentRecord


@dataclass(frozen=True)
class BlockToWrite:
    """One group's part of a node, and its slot."""

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
    """A turn's blocks in one cache."""

    cache: KeptCache
    blocks: Sequence[PathBlock]
    num_tokens: int

    @property
    def needed(self) -> list[tuple[Node, BlockName]]:
        """Blocks that later attention reads."""
        # A partly filled block before the last ends where an adapter begins. Only other conversations continue from it;
        # this one reads the adapter's block with the same tokens.
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
        return [
            BlockToWrite(self.cache, block.node, index, block.node.block_ids[index])
            for block in self.blocks
            for index in block.groups
            if index in block.node.block_ids and is_wanted(block.node, index)
        ]


@dataclass
class Commit:
    """A turn being saved.

    Attributes:
        parts: base's, then one per adapter with residuals.
        held: pinned blocks.
        num_bytes: written by earlier tries.
    """

    record: AgentRecord
    parts: list[CachePart]
    held: Sequence[BlockName]
    done: Callable[[Committed], None]
    num_bytes: int = 0
    tries: int = 0


def is_wanted(node: Node, index: int) -> bool:
    """Whether the file is neither on disk nor being written."""
    return index not in node.stored and index not in node.pending
