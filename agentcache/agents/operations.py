"""Operations on idle agents, and eviction of blocks from RAM."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from agentcache.agents.block_files import Pins
from agentcache.agents.caches import KeptCache, KeptCaches
from agentcache.agents.disk import Saved, when_all
from agentcache.agents.disk_jobs import cut_residuals
from agentcache.agents.persistence import Persistence
from agentcache.agents.restore import Restored, Restorer
from agentcache.agents.table import AgentTable, blocks_of, emptied, shown_time
from agentcache.agents.turn_write import CacheTurn
from agentcache.api.report import AgentInfo, CacheState, LineageInfo, RestoreReport
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import BASE_CACHE, BLOCK_SIZE, RESIDUAL, BlockName
from agentcache.blocks.origin_paths import NamedBlock, chain_keys, name_blocks, spans
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.search import Cached
from agentcache.errors import AgentCacheError, EngineStopped, InternalError, InvalidRequest, OutOfBlocks
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.manifest import AgentRecord


class AgentOperations:
    """Operations on idle agents. Raises as `AgentTable`. Engine thread only."""

    def __init__(
        self,
        caches: KeptCaches,
        agents: AgentTable,
        persistence: Persistence,
        pins: Pins,
        restorer: Restorer,
    ) -> None:
        self._caches = caches
        self._cache = caches.base.prefix
        self._agents = agents
        self._persistence = persistence
        self._pins = pins
        self._restorer = restorer

    def _residual_prefixes(self, records: Iterable[AgentRecord]) -> list[tuple[KeptCache, Cached]]:
        return [
            (cache, self._caches.prefix_of(record, cache))
            for record in records
            for cache in self._caches.further
            if record.residual_of(cache.name) is not None
        ]

    def info(self, agent_id: str) -> AgentInfo:
        lineages, record = self._agents.lineages(agent_id), self._agents.get(agent_id)
        prefixes = {each.name: self._caches.prefix_of(each) for each in lineages}
        longest, residuals = prefixes[record.name], self._residual_prefixes(lineages)
        in_ram = self._cache.in_ram(longest) and all(
            cache.prefix.in_ram(prefix) for cache, prefix in self._residual_prefixes([record])
        )
        state = CacheState.HOT if in_ram else CacheState.WARM
        residual_bytes = sum(
            _ram_bytes(cache.prefix, [prefix for other, prefix in residuals if other is cache])
            for cache in self._caches.further
        )
        blocks = blocks_of(lineages)
        return AgentInfo(
            id=record.id,
            tokens=len(record.transcript),
            blocks=-(-longest.num_tokens // BLOCK_SIZE),
            cache_state=state if longest.num_tokens else CacheState.COLD,
            ram_bytes=_ram_bytes(self._cache, prefixes.values()) + residual_bytes,
            residual_bytes=residual_bytes,
            disk_bytes=sum(map(self._disk_bytes, blocks)),
            residual_disk_bytes=sum(self._disk_bytes(block) for block in blocks if block.cache != BASE_CACHE),
            created=record.created,
            last_used=shown_time(max(each.last_used for each in lineages)),
            adapter=record.adapter,
            policy=record.policy,
            lineages=tuple(
                LineageInfo(each.lineage, len(each.transcript), shown_time(each.last_used)) for each in lineages
            ),
        )

    def _disk_bytes(self, block: NamedBlock) -> int:
        cache = self._caches.find(block.cache)
        if cache is None:
            return self._persistence.file_bytes(block)
        node = cache.prefix.tree.node(block.chain)
        if node is None:
            return 0
        groups = (cache.spec.all_groups[index] for index in node.stored.intersection(block.groups))
        return sum(group.bytes_of(node.num_tokens) for group in groups)

    def list(self) -> list[AgentInfo]:
        found = [self.info(agent_id) for agent_id in self._agents.ids]
        found += [_unavailable_info(agent_id, reason) for agent_id, reason in self._agents.unavailable.items()]
        return sorted(found, key=lambda info: info.id)

    def create(
        self, agent_id: str, adapter: str | None, policy: str, system: str | None, done: Callable[[Saved], None]
    ) -> None:
        record = self._agents.new(agent_id, policy=policy, system=system)
        self._persistence.save_record(replace(record, adapter=adapter), done)

    def look_again(self, agent_id: str, done: Callable[[None], None]) -> None:
        self._persistence.unavailable.look_again(agent_id, lambda: done(None))

    def bring_in(self, archive: ArchivedAgent, done: Callable[[Saved], None]) -> None:
        self._agents.new(archive.agent_id)
        self._persistence.bring_in(archive, done)

    def fork(
        self,
        agent_id: str,
        new_id: str,
        done: Callable[[Saved], None],
        lineage: str | None = None,
        adapter: str | None = None,
        policy: str | None = None,
    ) -> None:
        """Copy an agent's lineages, or one, sharing all blocks; with another adapter, base's only."""
        sources = [record.name for record in self._agents.lineages(agent_id, lineage)]
        copies = [
            _set_to(self._as_far_as_saved(copy), adapter, policy)
            for copy in self._agents.fork(agent_id, new_id, lineage)
        ]

        def finish(saved: Saved) -> None:
            for name in sources:
                self._pins.let_lineage_go(name)
            if saved.error is not None:  # all or nothing
                for copy in filter(None, (self._agents.find(copy.name) for copy in copies)):
                    self._persistence.delete_lineage(copy, lambda _: None)
            done(saved)

        saved_all = when_all(len(copies), finish)
        with self._pins.holding(sources):
            for copy in copies:
                self._persistence.save_record(copy, saved_all)

    def _as_far_as_saved(self, record: AgentRecord) -> AgentRecord:
        """Drop blocks outside the transcript, after an unsaved turn."""
        if not record.transcript.is_in_ram:
            return record  # so it is in the log
        has_state, holds = self._cache.snapshots is not None, self._cache.holds
        layout = spans(record.num_saved, record.producer, len(self._cache.groups), has_state=has_state, holds=holds)
        chains = chain_keys(self._caches.root(self._caches.base, record.salt), record.transcript.ids, layout)
        blocks, saved = name_blocks(chains, layout), set(record.block_names)
        lost = (span.begin for span, block in zip(layout, blocks, strict=True) if not saved.issuperset(block.names))
        num_saved = min(lost, default=record.num_saved)
        kept = tuple(block for span, block in zip(layout, blocks, strict=True) if span.end <= num_saved)
        snapshots = tuple(each for each in record.snapshots if each.num_tokens <= num_saved)
        record = replace(record, num_saved=num_saved, blocks=kept, snapshots=snapshots)
        return cut_residuals(record, self._caches.namespace)

    def delete(self, agent_id: str, done: Callable[[Saved], None], lineage: str | None = None) -> None:
        """Delete an agent or a lineage, except blocks that another one names.

        An agent's only lineage, if named, is emptied instead.
        """
        records = self._agents.lineages(agent_id, lineage)
        if lineage is not None and len(self._agents.lineages(agent_id)) == 1:
            self._persistence.empty_lineage(emptied(records[0]), done)
        else:
            deleted = when_all(len(records), done)
            for record in records:
                self._persistence.delete_lineage(record, deleted)

    def save(self, agent_id: str, done: Callable[[Saved], None], lineage: str | None = None) -> None:
        """Write unsaved data after a failed save."""
        records = self._agents.lineages(agent_id, lineage)
        saved_all = when_all(len(records), done)

        def save() -> None:
            for record in records:
                if record.transcript.is_in_ram:
                    self._save_lineage(record, saved_all)
                else:
                    saved_all(Saved(error="its transcript cannot be read"))

        self._persistence.read_transcripts(records, save)

    def _save_lineage(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        prefix = self._caches.prefix_of(record)
        num_saved = prefix.num_tokens
        if not all(path.ends_with_a_block for path in prefix.paths):
            num_saved -= num_saved % BLOCK_SIZE  # another agent's tail
        blocks = self._persistence.blocks_of(record, num_saved)
        record = replace(record, num_saved=num_saved, blocks=tuple(block.named for block in blocks))
        residuals = [turn for cache in self._caches.further if (turn := self._residual_turn(record, cache)) is not None]
        self._persistence.commit(record, [CacheTurn(BASE_CACHE, num_saved, blocks), *residuals], done)
        for block in reversed(blocks):
            self._cache.slots.prune(block.node)  # empty ones that `blocks_of` inserted

    def _residual_turn(self, record: AgentRecord, cache: KeptCache) -> CacheTurn | None:
        prefix, saved = self._caches.prefix_of(record, cache), record.residual_of(cache.name)
        num_tokens = prefix.num_tokens
        if not all(path.ends_with_a_block for path in prefix.paths):
            num_tokens -= num_tokens % BLOCK_SIZE
        if num_tokens <= (0 if saved is None else saved.num_saved):
            return None
        nodes = [node for path in prefix.paths for node in path.all_nodes]
        groups = tuple(range(len(cache.prefix.groups)))
        return CacheTurn(cache.name, num_tokens, [PathBlock(node, groups) for node in nodes if node.end <= num_tokens])

    def restore(
        self, agent_id: str, done: Callable[[RestoreReport | AgentCacheError], None], lineage: str | None = None
    ) -> None:
        """Load an agent's or a lineage's blocks into RAM, the longest last."""
        started, restored_bytes = time.perf_counter(), 0
        lineages = sorted(
            self._agents.lineages(agent_id, lineage), key=lambda record: len(record.transcript), reverse=True
        )
        num_tokens = len(lineages[0].transcript)
        due = [
            (record, cache)
            for record in lineages
            for cache in self._caches
            if cache.name == BASE_CACHE or record.residual_of(cache.name) is not None
        ]

        def attempt() -> None:
            record, cache = due[-1]
            try:
                prefix = self._caches.prefix_of(record, cache)
                sequence = cache.prefix.open(self._caches.root(cache, record.salt), prefix)
            except OutOfBlocks as error:
                done(InvalidRequest(str(error), code="insufficient_memory"))
                return
            cache.arenas.copy_blocks(sequence.copies)
            self._restorer.restore(sequence, lambda restored: finish(cache, sequence, restored), cache.name)

        def finish(cache: KeptCache, sequence: BlockTables, restored: Restored) -> None:
            nonlocal restored_bytes
            restored_bytes += restored.num_bytes
            try:
                try:
                    cache.arenas.evaluate()
                finally:
                    cache.prefix.abandon(sequence)  # the tree keeps loaded blocks
                if restored.complete:
                    due.pop()
                go_on()
            except EngineStopped as ended:
                done(ended)
                raise
            except BaseException:
                done(InternalError("the agent could not be restored; the log says why"))
                raise

        def go_on() -> None:
            while due and self._caches.find(due[-1][1].name) is not due[-1][1]:
                due.pop()  # its adapter was unloaded
            if due:
                attempt()
                return
            elapsed_ms = (time.perf_counter() - started) * 1e3
            done(RestoreReport(num_tokens, restored_bytes, elapsed_ms, self.info(agent_id).cache_state))

        go_on()


def _unavailable_info(agent_id: str, reason: str) -> AgentInfo:
    return AgentInfo(
        id=agent_id,
        tokens=0,
        blocks=0,
        cache_state=CacheState.UNAVAILABLE,
        ram_bytes=0,
        disk_bytes=0,
        created=0.0,
        last_used=0.0,
        unavailable=reason,
    )


def _set_to(record: AgentRecord, adapter: str | None, policy: str | None) -> AgentRecord:
    residuals = record.residuals if adapter in (None, record.adapter) else ()
    return replace(record, adapter=adapter or record.adapter, policy=policy or record.policy, residuals=residuals)


def _ram_bytes(cache: PrefixCache, prefixes: Iterable[Cached]) -> int:
    prefixes = list(prefixes)
    held = {
        (node, index)
        for prefix in prefixes
        for path in prefix.paths
        for node in path.all_nodes
        for index in node.block_ids.keys() & set(path.groups)
    }
    of_states = {node for prefix in prefixes if (node := prefix.snapshot) is not None and node.state is not None}
    state_bytes = 0 if cache.snapshots is None else cache.snapshots.group.bytes_per_block
    return sum(cache.groups[index].bytes_per_block for _, index in held) + state_bytes * len(of_states)


class Eviction:
    """Frees RAM on request or under memory pressure. Engine thread only."""

    def __init__(self, caches: KeptCaches, agents: AgentTable, persistence: Persistence) -> None:
        self._caches = caches
        self._cache = caches.base.prefix
        self._agents = agents
        self._persistence = persistence

    def evict(
        self, agent_id: str, done: Callable[[None], None], lineage: str | None = None, kind: str | None = None
    ) -> None:
        """Free an agent's or lineage's RAM of one `kind` (None for all), except unsaved blocks and those being read.

        Also evicts unneeded tails, which would keep the blocks in RAM.
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
        """Evict a share of the saved blocks that no request reads, stalest first; return their number."""
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
        """Evict a share of the unpinned checkpoints, stalest first; return their number.

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
