"""A restore under way: blocks of a sequence that are on disk only, on their way to its slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentcache.agents.caches import KeptCache
from agentcache.blocks.keys import block_key
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.sequence import CacheSequence, Load
from agentcache.kv.block_layout import Array
from agentcache.store.block_extras import Extras
from agentcache.store.block_file import BlockHeader


def header_of(node: Node, index: int, cache: KeptCache) -> BlockHeader:
    """What the file of one cache group's part of a node has to say of itself."""
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
    """How a restore ended.

    Args:
        num_bytes: bytes of keys and values read.
        seconds: from the start to the last block in place.
        complete: False where a file was missing or wrong (it is in quarantine then, and no longer known).
    """

    num_bytes: int
    seconds: float
    complete: bool


@dataclass(frozen=True)
class Read:
    """What came of a block's file; `extras` is None if that was missing or wrong.

    `data` is the block as the file has it; None where it lies in its slot already.
    """

    load: Load
    extras: Extras | None
    data: Array | None = None


@dataclass
class Restoring:
    """Counts what is still due. Belongs to the engine thread.

    Args:
        done: gets the outcome when nothing is.
    """

    cache: KeptCache
    sequence: CacheSequence
    done: Callable[[Restored], None]
    blocks_due: int
    num_bytes: int = 0
    complete: bool = True
    started_at: float = field(default_factory=time.perf_counter)

    def block_bytes(self, group: int) -> int:
        """Of a full block."""
        return self.cache.prefix.all_groups[group].bytes_per_block

    def header(self, load: Load) -> BlockHeader:
        """What the file of a block that is due has to say of itself."""
        return header_of(load.node, load.group, self.cache)

    def settle(self, reads: Sequence[Read]) -> None:
        """What has been read lies in its slots: publish it."""
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
        """So many blocks are no longer due."""
        self.blocks_due -= num_blocks
        if not self.blocks_due:
            self.done(Restored(self.num_bytes, time.perf_counter() - self.started_at, self.complete))
