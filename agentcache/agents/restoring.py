from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentcache.agents.caches import KeptCache
from agentcache.blocks.block_tables import BlockTables, Load
from agentcache.blocks.keys import block_key
from agentcache.blocks.radix_tree import Node
from agentcache.kv.block_layout import Array
from agentcache.store.block_extras import Extras
from agentcache.store.block_file import BlockHeader


def header_of(node: Node, index: int, cache: KeptCache) -> BlockHeader:
    """The header that a block's file must have."""
    assert node.parent is not None
    group = cache.prefix.all_groups[index].name
    return BlockHeader(
        block_key=block_key(node.chain, group),
        chain=node.chain,
        parent=node.parent.chain,
        group=group,
        position=node.position,
        packed=node.packed,
        producer=node.producer,
        cache=cache.name,
    )


@dataclass(frozen=True)
class Restored:
    """Outcome of a restore.

    Args:
        num_bytes: bytes of keys and values read.
        complete: whether all files were valid; damaged ones are in quarantine.
    """

    num_bytes: int
    seconds: float
    complete: bool


@dataclass(frozen=True)
class Read:
    """Result of reading one file.

    Args:
        extras: None if the file was missing or damaged.
        data: the stored block; None if already in its slot.
    """

    load: Load
    extras: Extras | None
    data: Array | None = None


@dataclass
class Restoring:
    """Counts the remaining blocks of a restore. Engine thread only."""

    cache: KeptCache
    sequence: BlockTables
    done: Callable[[Restored], None]
    blocks_due: int
    num_bytes: int = 0
    complete: bool = True
    started_at: float = field(default_factory=time.perf_counter)

    def block_bytes(self, group: int) -> int:
        return self.cache.prefix.all_groups[group].bytes_per_block

    def header(self, load: Load) -> BlockHeader:
        return header_of(load.node, load.group, self.cache)

    def finish(self, reads: Sequence[Read]) -> None:
        cache = self.cache
        for read in reads:
            load = read.load
            if read.extras is None:
                cache.prefix.mark_missing(load.node, load.group)
                self.complete = False
                continue
            self.num_bytes += cache.spec.all_groups[load.group].bytes_of(load.node.num_tokens)
            if not self.sequence.closed:
                cache.arenas.put_extras(load.group, load.block_id, load.node.num_tokens, read.extras)
                cache.prefix.loaded(self.sequence, load)
        self.drop(len(reads))

    def drop(self, num_blocks: int) -> None:
        self.blocks_due -= num_blocks
        if not self.blocks_due:
            self.done(Restored(self.num_bytes, time.perf_counter() - self.started_at, self.complete))
