from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.persistence import Persistence
from agentcache.agents.table import AgentTable, blocks_of
from agentcache.blocks.keys import RESIDUAL, BlockName
from agentcache.blocks.origin_paths import NamedBlock
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.store.manifest import AgentRecord


class Eviction:
    """Frees RAM of one agent on request, or of all under memory pressure. Engine thread only."""

    def __init__(self, caches: KeptCaches, agents: AgentTable, persistence: Persistence) -> None:
        self._caches = caches
        self._cache = caches.base.prefix
        self._agents = agents
        self._persistence = persistence

    def evict(
        self, agent_id: str, done: Callable[[None], None], lineage: str | None = None, kind: str | None = None
    ) -> None:
        """Free an agent's or lineage's RAM, except unsaved blocks and those being read. Raises NotFound.

        Includes unneeded tails after its blocks, which would keep those in RAM.

        Args:
            kind: `base`, `residual`, or None for both.
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

        self._persistence.jobs.when_finished(evict)

    def evict_unread(self, share: float) -> int:
        """Evict a share of the unread saved blocks, least recently used first; returns their number."""
        unsaved = self._unsaved()
        return sum(_evict_unread(cache.prefix, share, unsaved) for cache in self._caches)

    def _unsaved(self) -> set[Node]:
        # A turn's last token is generated but not computed.
        behind = [each for each in self._agents if each.num_saved < len(each.transcript) - 1]
        prefixes = [self._caches.prefix_of(each) for each in behind]
        prefixes += [self._caches.prefix_of(each, cache) for each in behind for cache in self._caches.further]
        nodes = (node for prefix in prefixes for path in prefix.paths for node in path.all_nodes)
        return {node for node in nodes if not node.block_ids.keys() <= node.stored}

    def evict_snapshots(self, share: float) -> int:
        """Evict a share of the unpinned checkpoints, least recently used first; returns their number.

        A lineage's last checkpoint stays until it is on disk; its write starts here.
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
        return tuple(self._cache.checkpoints.find(root, ids, len(ids), record.producer))

    def _evict_snapshots(self, records: Iterable[AgentRecord]) -> None:
        for record in records:
            for node in self._snapshots_of(record):
                assert self._cache.snapshots is not None
                self._cache.snapshots.evict(node)


def _evict_from(cache: KeptCache, blocks: Iterable[NamedBlock], persistence: Persistence) -> None:
    tree, blocks = cache.prefix.tree, list(blocks)
    nodes = [node for block in blocks if (node := tree.node(block.chain)) is not None]
    parents = {parent for node in nodes for parent in (node, node.parent) if parent is not None}
    tails = [tail for parent in parents for tail in parent.children if not tail.is_full]
    for tail in tails:
        if not any(persistence.needs(BlockName(tail.chain, index, cache.name)) for index in tail.block_ids):
            cache.prefix.slots.evict(tail)
    cache.prefix.evict(block for block in blocks if _is_on_disk(cache.prefix, block))


def _is_on_disk(cache: PrefixCache, block: NamedBlock) -> bool:
    node = cache.tree.node(block.chain)
    return node is not None and node.block_ids.keys() & set(block.groups) <= node.stored


def _evict_unread(cache: PrefixCache, share: float, unsaved: set[Node]) -> int:
    slots, passed = cache.slots, set[Node]()
    before, wanted = slots.evicted_blocks, math.ceil(share * cache.count_blocks().cached)
    for node in list(cache.tree.residents):
        passed.add(node)
        # A path's end goes before its beginning.
        while node in passed and node.block_ids and node not in unsaved and slots.evicted_blocks - before < wanted:
            if not slots.evict(node) or node.parent is None:
                break
            node = node.parent
    return slots.evicted_blocks - before
