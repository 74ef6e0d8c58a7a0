"""Freeing the RAM of agents: of one, as a client asks, or of all, as memory is short. They come back warm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.persistence import Persistence
from agentcache.agents.table import AgentTable, blocks_of
from agentcache.blocks.keys import RESIDUAL, BlockName
from agentcache.blocks.lanes import NamedBlock
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.store.manifest import AgentRecord


class Eviction:
    """Has blocks and snapshots leave RAM that nobody reads. Belongs to the engine thread."""

    def __init__(self, caches: KeptCaches, agents: AgentTable, persistence: Persistence) -> None:
        self._caches = caches
        self._cache = caches.base.prefix
        self._agents = agents
        self._persistence = persistence

    def evict(
        self, agent_id: str, done: Callable[[None], None], lineage: str | None = None, kind: str | None = None
    ) -> None:
        """Free the RAM of an agent (or one of its lineages): all that is on disk and that nobody reads.

        Args:
            kind: only of its blocks in caches of this kind, `base` or `residual`.

        Partly filled blocks behind its own that no lineage names any more leave RAM too: they would keep the blocks
        before them there. Raises NotFound.
        """
        known = self._agents.lineages(agent_id, lineage)
        blocks = blocks_of(known)
        for record in known:
            self._persistence.save_snapshot(record)

        def evict() -> None:
            if kind != RESIDUAL:
                self._evict_snapshots(known)
            for cache in self._caches:
                if kind is None or cache.kind == kind:
                    _evict_from(cache, [block for block in blocks if block.cache == cache.name], self._persistence)
            done(None)

        self._persistence.jobs.when_settled(evict)

    def evict_unread(self, share: float) -> int:
        """Free the RAM of a share of the blocks that nobody reads, least recently used first.

        What agents have in RAM only, since it could not be written, stays. Returns how many blocks left.
        """
        unsaved = self._unsaved()
        return sum(_evict_unread(cache.prefix, share, unsaved) for cache in self._caches)

    def _unsaved(self) -> set[Node]:
        """What agents have in RAM and not on disk."""
        # The last token of a turn has been generated and not computed.
        behind = [each for each in self._agents if each.num_saved < len(each.transcript) - 1]
        prefixes = [self._caches.prefix_of(each) for each in behind]
        prefixes += [self._caches.prefix_of(each, cache) for each in behind for cache in self._caches.further]
        nodes = (node for prefix in prefixes for lane in prefix.lanes for node in lane.all_nodes)
        return {node for node in nodes if not node.block_ids.keys() <= node.stored}

    def evict_snapshots(self, share: float) -> int:
        """Free the RAM of a share of the snapshots that nobody is about to start from, least recently used first.

        The last one of each lineage is written first if it is not on disk, and stays until it is. Returns how many
        left.
        """
        snapshots = self._cache.snapshots
        if snapshots is None:
            return 0
        self._persistence.save_snapshots(time.monotonic())
        nodes = list(snapshots.nodes)
        last = {each[-1] for each in map(self._snapshots_of, self._agents) if each}
        leaving = [node for node in nodes if node not in last or snapshots.index in node.stored]
        return sum(snapshots.evict(node) for node in leaving[: math.ceil(share * len(nodes))])

    def _snapshots_of(self, record: AgentRecord) -> tuple[Node, ...]:
        root, ids = self._caches.root(self._caches.base, record.salt), self._caches.ids_of(record)
        return tuple(self._cache.find_snapshots(root, ids, len(ids), record.producer))

    def _evict_snapshots(self, records: Iterable[AgentRecord]) -> None:
        """Free the RAM of all snapshots of these lineages; those that are not on disk by now are given up."""
        for record in records:
            for node in self._snapshots_of(record):
                assert self._cache.snapshots is not None  # it has found some
                self._cache.snapshots.evict(node)


def _evict_from(cache: KeptCache, blocks: Iterable[NamedBlock], persistence: Persistence) -> None:
    """Free the RAM of these blocks of the cache, and of tails beside them that nobody needs any more."""
    tree, blocks = cache.prefix.tree, list(blocks)
    nodes = [node for block in blocks if (node := tree.node(block.chain)) is not None]
    parents = {parent for node in nodes for parent in (node, node.parent) if parent is not None}
    tails = [tail for parent in parents for tail in parent.children if not tail.is_full]
    for tail in tails:
        if not any(persistence.needs(BlockName(tail.chain, index, cache.name)) for index in tail.block_ids):
            cache.prefix.slots.evict(tail)
    cache.prefix.evict(block for block in blocks if _is_on_disk(cache.prefix, block))


def _is_on_disk(cache: PrefixCache, block: NamedBlock) -> bool:
    """Whether what is in RAM of the block is on disk too."""
    node = cache.tree.node(block.chain)
    return node is not None and node.block_ids.keys() & set(block.groups) <= node.stored


def _evict_unread(cache: PrefixCache, share: float, unsaved: set[Node]) -> int:
    slots, passed = cache.slots, set[Node]()
    before, wanted = slots.evicted_blocks, math.ceil(share * cache.count_blocks().cached)
    for node in list(cache.tree.residents):
        passed.add(node)
        # The end of a path goes before its beginning, which may have been in RAM for longer.
        while node in passed and node.block_ids and node not in unsaved and slots.evicted_blocks - before < wanted:
            if not slots.evict(node) or node.parent is None:
                break
            node = node.parent
    return slots.evicted_blocks - before
