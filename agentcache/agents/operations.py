"""Agents between their turns: what they hold, and moving it between RAM and disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from agentcache.agents.in_use import InUse
from agentcache.agents.persistence import Persistence
from agentcache.agents.restore import Restored, Restorer
from agentcache.agents.saved import Saved, when_all
from agentcache.agents.table import AgentTable, blocks_of, emptied
from agentcache.blocks.keys import BLOCK_SIZE, BlockName, Namespace
from agentcache.blocks.lane_search import CachedPrefix
from agentcache.blocks.lanes import NamedBlock, chain_keys, name_blocks, spans
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.radix_tree import Node
from agentcache.blocks.sequence import CacheSequence
from agentcache.errors import AgentCacheError, InvalidRequest, OutOfBlocks
from agentcache.models.runner import ModelRunner
from agentcache.report import AgentInfo, CacheState, LineageInfo, RestoreReport
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.manifest import AgentRecord


class AgentOperations:
    """Operations on agents that no request is at work on. All belong to the engine thread."""

    def __init__(
        self,
        cache: PrefixCache,
        runner: ModelRunner,
        agents: AgentTable,
        persistence: Persistence,
        in_use: InUse,
        restorer: Restorer,
        namespace: Callable[[str], Namespace],
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._agents = agents
        self._persistence = persistence
        self._in_use = in_use
        self._restorer = restorer
        self._namespace = namespace

    def _prefix(self, record: AgentRecord) -> CachedPrefix:
        ids = record.transcript.ids
        return self._cache.match_prefix(self._namespace(record.salt).root, ids, len(ids), record.producer)

    def info(self, agent_id: str) -> AgentInfo:
        """An agent as clients see it. Raises NotFound."""
        lineages, record = self._agents.lineages(agent_id), self._agents.get(agent_id)
        prefixes = {each.name: self._prefix(each) for each in lineages}
        longest = prefixes[record.name]
        state = CacheState.HOT if self._cache.in_ram(longest) else CacheState.WARM
        return AgentInfo(
            id=record.id,
            tokens=len(record.transcript.ids),
            blocks=-(-longest.num_tokens // BLOCK_SIZE),
            cache_state=state if longest.num_tokens else CacheState.COLD,
            ram_bytes=self._ram_bytes(prefixes.values()),
            disk_bytes=sum(map(self._disk_bytes, blocks_of(lineages))),
            created=record.created,
            last_used=max(each.last_used for each in lineages),
            adapter=record.adapter,
            policy=record.policy,
            lineages=tuple(LineageInfo(each.lineage, len(each.transcript), each.last_used) for each in lineages),
        )

    def _ram_bytes(self, prefixes: Iterable[CachedPrefix]) -> int:
        """Of what these have in RAM, each part of a block once."""
        held = {
            (node, index)
            for prefix in prefixes
            for lane in prefix.lanes
            for node in lane.all_nodes
            for index in node.block_ids.keys() & set(lane.groups)
        }
        of_states = {node for prefix in prefixes if (node := prefix.snapshot) is not None and node.state is not None}
        return sum(self._cache.groups[index].bytes_per_block for _, index in held) + self._state_bytes * len(of_states)

    @property
    def _state_bytes(self) -> int:
        """Of one snapshot of recurrent state."""
        return 0 if self._cache.snapshots is None else self._cache.snapshots.group.bytes_per_block

    def _disk_bytes(self, block: NamedBlock) -> int:
        """Of what the manifest names: the tree may know longer tails of others with the same beginning."""
        node, groups = self._cache.tree.node(block.chain), self._cache.groups
        if node is None:
            return 0
        stored = node.stored.intersection(block.groups)
        of_state = self._state_bytes if len(groups) in stored else 0
        of_tokens = (groups[index].bytes_per_block for index in stored if index < len(groups))
        return of_state + sum(each * node.num_tokens // BLOCK_SIZE for each in of_tokens)

    def list(self) -> list[AgentInfo]:
        """All agents, by id."""
        return [self.info(agent_id) for agent_id in self._agents.ids]

    def create(
        self, agent_id: str, adapter: str | None, policy: str, system: str | None, done: Callable[[Saved], None]
    ) -> None:
        """Make an agent without a conversation, durably. Raises InvalidRequest, Conflict."""
        record = self._agents.new(agent_id, policy=policy, system=system)
        self._persistence.save_record(replace(record, adapter=adapter), done)

    def bring_in(self, archive: ArchivedAgent, done: Callable[[Saved], None]) -> None:
        """Make an agent of an archive, durably. Raises Conflict."""
        self._agents.new(archive.agent_id)
        self._persistence.bring_in(archive, done)

    def fork(self, agent_id: str, new_id: str, done: Callable[[Saved], None], lineage: str | None = None) -> None:
        """Make an agent with the same conversations (or one lineage of them), durably, sharing every block.

        Raises NotFound, Conflict.
        """
        sources = [record.name for record in self._agents.lineages(agent_id, lineage)]
        copies = [self._as_far_as_saved(copy) for copy in self._agents.fork(agent_id, new_id, lineage)]
        for name in sources:
            self._in_use.hold_lineage(name)

        def settle(saved: Saved) -> None:
            for name in sources:
                self._in_use.let_lineage_go(name)
            if saved.error is not None:  # all or nothing
                for copy in filter(None, (self._agents.find(copy.name) for copy in copies)):
                    self._persistence.delete_lineage(copy, lambda _: None)
            done(saved)

        saved_all = when_all(len(copies), settle)
        for copy in copies:
            self._persistence.save_record(copy, saved_all)

    def _as_far_as_saved(self, record: AgentRecord) -> AgentRecord:
        """The record without blocks that are not of its transcript: a turn may have changed it and not been saved."""
        has_state = self._cache.snapshots is not None
        layout = spans(record.num_saved, record.producer, len(self._cache.groups), has_state=has_state)
        chains = chain_keys(self._namespace(record.salt).root, record.transcript.ids, layout)
        blocks, saved = name_blocks(chains, layout), set(record.block_names)
        lost = (span.begin for span, block in zip(layout, blocks, strict=True) if not saved.issuperset(block.names))
        num_saved = min(lost, default=record.num_saved)
        kept = tuple(block for span, block in zip(layout, blocks, strict=True) if span.end <= num_saved)
        snapshots = tuple(each for each in record.snapshots if each.num_tokens <= num_saved)
        return replace(record, num_saved=num_saved, blocks=kept, snapshots=snapshots)

    def delete(self, agent_id: str, done: Callable[[Saved], None], lineage: str | None = None) -> None:
        """Forget an agent (or one of its lineages) in RAM and on disk, but for what others name. Raises NotFound.

        Of an agent whose only lineage goes by name, an empty one stays.
        """
        records = self._agents.lineages(agent_id, lineage)
        if lineage is not None and len(self._agents.lineages(agent_id)) == 1:
            self._persistence.empty_lineage(emptied(records[0]), done)
        else:
            deleted = when_all(len(records), done)
            for record in records:
                self._persistence.delete_lineage(record, deleted)

    def evict(self, agent_id: str, done: Callable[[None], None], lineage: str | None = None) -> None:
        """Free the RAM of an agent (or one of its lineages): all that is on disk and that nobody reads.

        With it goes what was in RAM only as somebody's last, partly filled block, and belongs to nobody any more: it
        would keep the blocks before it. Raises NotFound.
        """
        known = self._agents.lineages(agent_id, lineage)
        blocks = blocks_of(known)
        for record in known:
            self._persistence.save_snapshot(record)

        def evict() -> None:
            self._evict_snapshots(known)
            self._evict_superseded_tails(blocks)
            self._cache.evict(block for block in blocks if self._is_on_disk(block))
            done(None)

        self._persistence.when_settled(evict)

    def evict_unread(self, share: float) -> int:
        """Free the RAM of a share of the blocks that nobody reads, least recently used first.

        What agents have in RAM only, since it could not be written, stays. Returns how many blocks left.
        """
        slots, unsaved = self._cache.slots, self._unsaved()
        before, wanted = slots.evicted_blocks, math.ceil(share * self._cache.count_blocks().cached)
        passed = set[Node]()
        for node in list(self._cache.tree.residents):
            passed.add(node)
            # The end of a path goes before its beginning, which may have been in RAM for longer.
            while node in passed and node.block_ids and node not in unsaved and slots.evicted_blocks - before < wanted:
                if not slots.evict(node) or node.parent is None:
                    break
                node = node.parent
        return slots.evicted_blocks - before

    def _unsaved(self) -> set[Node]:
        """What agents have in RAM and not on disk."""
        # The last token of a turn has been generated and not computed.
        behind = (each for each in self._agents if each.num_saved < len(each.transcript.ids) - 1)
        nodes = (node for each in behind for lane in self._prefix(each).lanes for node in lane.all_nodes)
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
        root, ids = self._namespace(record.salt).root, record.transcript.ids
        return tuple(self._cache.find_snapshots(root, ids, len(ids), record.producer))

    def _evict_snapshots(self, records: Iterable[AgentRecord]) -> None:
        """All of these lineages': what is not on disk by now is not worth it."""
        for record in records:
            for node in self._snapshots_of(record):
                assert self._cache.snapshots is not None  # it has found some
                self._cache.snapshots.evict(node)

    def _evict_superseded_tails(self, blocks: Iterable[NamedBlock]) -> None:
        nodes = filter(None, (self._cache.tree.node(block.chain) for block in blocks))
        parents = {parent for node in nodes for parent in (node, node.parent) if parent is not None}
        tails = [tail for parent in parents for tail in parent.children if not tail.is_full]
        for tail in tails:
            if not any(self._persistence.needs(BlockName(tail.chain, index)) for index in tail.block_ids):
                self._cache.slots.evict(tail)

    def _is_on_disk(self, block: NamedBlock) -> bool:
        """Whether what is in RAM of the block is on disk too."""
        node = self._cache.tree.node(block.chain)
        return node is not None and node.block_ids.keys() & set(block.groups) <= node.stored

    def save(self, agent_id: str, done: Callable[[Saved], None], lineage: str | None = None) -> None:
        """Write what of an agent is in RAM but not on disk (after a failed save). Raises NotFound."""
        records = self._agents.lineages(agent_id, lineage)
        saved_all = when_all(len(records), done)
        for record in records:
            self._save_lineage(record, saved_all)

    def _save_lineage(self, record: AgentRecord, done: Callable[[Saved], None]) -> None:
        prefix = self._prefix(record)
        num_saved = prefix.num_tokens
        if not all(lane.ends_with_a_block for lane in prefix.lanes):
            num_saved -= num_saved % BLOCK_SIZE  # the tail is another agent's
        blocks = self._persistence.blocks_of(record, num_saved)
        record = replace(record, num_saved=num_saved, blocks=tuple(block.named for block in blocks))
        self._persistence.commit(record, blocks, done)
        for block in reversed(blocks):
            self._cache.slots.prune(block.node)  # a base tail that was not there was made, and holds nothing

    def restore(
        self, agent_id: str, done: Callable[[RestoreReport | AgentCacheError], None], lineage: str | None = None
    ) -> None:
        """Bring an agent's blocks (of one lineage) into RAM; what files do not give is left out. Raises NotFound.

        The longest lineage comes last, so that what RAM cannot hold beside it gives way to it.
        """
        started, restored_bytes = time.perf_counter(), 0
        due = sorted(self._agents.lineages(agent_id, lineage), key=lambda record: len(record.transcript), reverse=True)
        num_tokens = len(due[0].transcript)

        def attempt() -> None:
            try:
                sequence = self._cache.open(self._namespace(due[-1].salt).root, self._prefix(due[-1]))
            except OutOfBlocks as error:
                done(InvalidRequest(str(error), code="insufficient_memory"))
                return
            self._runner.copy_blocks(sequence.copies)
            self._restorer.restore(sequence, lambda restored: settle(sequence, restored))

        def settle(sequence: CacheSequence, restored: Restored) -> None:
            nonlocal restored_bytes
            restored_bytes += restored.num_bytes
            self._runner.evaluate()
            self._cache.abandon(sequence)  # what was loaded is the tree's by now
            if restored.complete:
                due.pop()
            if due:
                attempt()
                return
            elapsed_ms = (time.perf_counter() - started) * 1e3
            done(RestoreReport(num_tokens, restored_bytes, elapsed_ms, self.info(agent_id).cache_state))

        attempt()
