"""Agents between their turns: what they hold, and moving it between RAM and disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from agentcache.blocks.keys import BLOCK_SIZE, Namespace
from agentcache.blocks.lane_search import CachedPrefix
from agentcache.blocks.lanes import NamedBlock, chain_keys, name_blocks, spans
from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.blocks.sequence import Sequence
from agentcache.errors import AgentCacheError, InvalidRequest, OutOfBlocks
from agentcache.kv.manifest import AgentRecord
from agentcache.models.runner import ModelRunner
from agentcache.serving.agents import AgentTable
from agentcache.serving.generation import Saved
from agentcache.serving.persistence import Persistence
from agentcache.serving.report import AgentInfo, CacheState, RestoreReport
from agentcache.serving.restore import Restored, Restorer


class AgentMemory:
    """Operations on agents that no request is at work on. All belong to the engine thread."""

    def __init__(
        self,
        cache: PrefixCache,
        runner: ModelRunner,
        agents: AgentTable,
        persistence: Persistence,
        restorer: Restorer,
        namespace: Callable[[str], Namespace],
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._agents = agents
        self._persistence = persistence
        self._restorer = restorer
        self._namespace = namespace

    def _prefix(self, record: AgentRecord) -> CachedPrefix:
        ids = record.transcript.ids
        return self._cache.match_prefix(self._namespace(record.salt).root, ids, len(ids), record.producer)

    def info(self, agent_id: str) -> AgentInfo:
        """An agent as clients see it. Raises NotFound."""
        record = self._agents.get(agent_id)
        prefix, groups = self._prefix(record), self._cache.groups
        num_ram = sum(
            groups[i].bytes_per_block
            for lane in prefix.lanes
            for node in lane.all_nodes
            for i in node.block_ids.keys() & set(lane.groups)
        )
        state = CacheState.HOT if self._cache.in_ram(prefix) else CacheState.WARM
        return AgentInfo(
            id=record.id,
            tokens=len(record.transcript.ids),
            blocks=-(-prefix.num_tokens // BLOCK_SIZE),
            cache_state=state if prefix.num_tokens else CacheState.COLD,
            ram_bytes=num_ram,
            disk_bytes=sum(self._disk_bytes(block) for block in record.blocks),
            created=record.created,
            last_used=record.last_used,
            adapter=record.adapter,
            policy=record.policy,
        )

    def _disk_bytes(self, block: NamedBlock) -> int:
        """Of what the manifest names: the tree may know longer tails of others with the same beginning."""
        node, groups = self._cache.tree.node(block.chain), self._cache.groups
        if node is None:
            return 0
        stored = node.stored.intersection(block.groups)
        return sum(groups[index].bytes_per_block * node.num_tokens // BLOCK_SIZE for index in stored)

    def list(self) -> list[AgentInfo]:
        """All agents, by id."""
        return [self.info(agent_id) for agent_id in sorted(record.id for record in self._agents)]

    def create(
        self, agent_id: str, adapter: str | None, policy: str, system: str | None, done: Callable[[Saved], None]
    ) -> None:
        """Make an agent without memory, durably. Raises InvalidRequest, Conflict."""
        record = self._agents.new(agent_id, policy=policy, system=system)
        self._persistence.save_record(replace(record, adapter=adapter), done)

    def fork(self, agent_id: str, new_id: str, done: Callable[[Saved], None]) -> None:
        """Make an agent with the same memory, durably, sharing every block. Raises NotFound, Conflict."""
        copy = self._as_far_as_saved(self._agents.fork(agent_id, new_id))
        self._agents.set_busy(agent_id)

        def settle(saved: Saved) -> None:
            self._agents.set_idle(agent_id)
            done(saved)

        self._persistence.save_record(copy, settle)

    def _as_far_as_saved(self, record: AgentRecord) -> AgentRecord:
        """The record without blocks that are not of its transcript: a turn may have changed it and not been saved."""
        layout = spans(record.num_saved, record.producer, len(self._cache.groups))
        chains = chain_keys(self._namespace(record.salt).root, record.transcript.ids, layout)
        blocks, saved = name_blocks(chains, layout), set(record.block_names)
        lost = (span.begin for span, block in zip(layout, blocks, strict=True) if not saved.issuperset(block.names))
        num_saved = min(lost, default=record.num_saved)
        kept = tuple(block for span, block in zip(layout, blocks, strict=True) if span.end <= num_saved)
        return replace(record, num_saved=num_saved, blocks=kept)

    def delete(self, agent_id: str, done: Callable[[Saved], None]) -> None:
        """Forget an agent in RAM and on disk, but for what others name. Raises NotFound."""
        record = self._agents.get(agent_id)
        released = self._persistence.delete_agent(record, done)
        self._evict(block for block in record.blocks if released.issuperset(block.names))

    def evict(self, agent_id: str) -> None:
        """Free the agent's RAM as far as its blocks are on disk and nobody reads them. Raises NotFound."""
        self._evict(block for block in self._agents.get(agent_id).blocks if self._is_on_disk(block))

    def _is_on_disk(self, block: NamedBlock) -> bool:
        """Whether what is in RAM of the block is on disk too."""
        node = self._cache.tree.node(block.chain)
        return node is not None and node.block_ids.keys() & set(block.groups) <= node.stored

    def _evict(self, blocks: Iterable[NamedBlock]) -> None:
        """Free the RAM of blocks, the last ones of their sequences first."""
        found = [(node, block.groups) for block in blocks if (node := self._cache.tree.node(block.chain)) is not None]
        for node, groups in sorted(found, key=lambda entry: entry[0].position, reverse=True):
            self._cache.slots.evict(node, groups)

    def save(self, agent_id: str, done: Callable[[Saved], None]) -> None:
        """Write what of an agent's memory is in RAM but not on disk (after a failed save). Raises NotFound."""
        record = self._agents.get(agent_id)
        prefix = self._prefix(record)
        num_saved = prefix.num_tokens
        if not all(lane.ends_with_a_block for lane in prefix.lanes):
            num_saved -= num_saved % BLOCK_SIZE  # the tail is another agent's
        blocks = self._persistence.blocks_of(record, num_saved)
        record = replace(record, num_saved=num_saved, blocks=tuple(block.named for block in blocks))
        self._persistence.commit(record, blocks, done)
        for block in reversed(blocks):
            self._cache.slots.prune(block.node)  # a base tail that was not there was made, and holds nothing

    def restore(self, agent_id: str, done: Callable[[RestoreReport | AgentCacheError], None]) -> None:
        """Bring an agent's blocks into RAM; what files do not give is left out. Raises NotFound."""
        record, started, restored_bytes = self._agents.get(agent_id), time.perf_counter(), 0
        root = self._namespace(record.salt).root

        def attempt() -> None:
            try:
                sequence = self._cache.open(root, self._prefix(record))
            except OutOfBlocks as error:
                done(InvalidRequest(str(error), code="insufficient_memory"))
                return
            self._runner.copy_blocks(sequence.copies)
            self._restorer.restore(sequence, lambda restored: settle(sequence, restored))

        def settle(sequence: Sequence, restored: Restored) -> None:
            nonlocal restored_bytes
            restored_bytes += restored.num_bytes
            self._runner.evaluate()
            self._cache.abandon(sequence)  # what was loaded is the tree's by now
            if not restored.complete:
                attempt()
                return
            elapsed_ms = (time.perf_counter() - started) * 1e3
            state = self.info(agent_id).cache_state
            done(RestoreReport(len(record.transcript.ids), restored_bytes, elapsed_ms, state))

        attempt()
