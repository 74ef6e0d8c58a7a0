"""Agents between their turns: what they hold, and moving it between RAM and disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from agentcache.blocks.keys import BLOCK_SIZE, Namespace, chain_key
from agentcache.blocks.prefix_cache import CachedPrefix, PrefixCache, Sequence
from agentcache.errors import AgentCacheError, InvalidRequest, OutOfBlocks
from agentcache.kv.manifest import AgentRecord
from agentcache.models.runner import ModelRunner
from agentcache.serving.agents import AgentTable
from agentcache.serving.generation import Saved
from agentcache.serving.persistence import Persistence
from agentcache.serving.request import AgentInfo, CacheState, RestoreReport
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
        return self._cache.match_prefix(self._namespace(record.salt).root, ids, len(ids))

    def info(self, agent_id: str) -> AgentInfo:
        """An agent as clients see it. Raises NotFound."""
        record = self._agents.get(agent_id)
        prefix, groups = self._prefix(record), self._cache.groups
        num_ram = sum(groups[i].bytes_per_block for node in prefix.all_nodes for i in node.block_ids)
        # Of the blocks that its manifest names: the tree may know longer tails of others with the same beginning.
        nodes = filter(None, map(self._cache.tree.node, record.chains))
        num_disk = sum(groups[i].bytes_per_block * node.num_tokens // BLOCK_SIZE for node in nodes for i in node.stored)
        state = CacheState.HOT if self._cache.in_ram(prefix) else CacheState.WARM
        return AgentInfo(
            id=record.id,
            tokens=len(record.transcript.ids),
            blocks=len(prefix.all_nodes),
            cache_state=state if prefix.num_tokens else CacheState.COLD,
            ram_bytes=num_ram,
            disk_bytes=num_disk,
            created=record.created,
            last_used=record.last_used,
            adapter=record.adapter,
            policy=record.policy,
        )

    def list(self) -> list[AgentInfo]:
        """All agents, by id."""
        return [self.info(agent_id) for agent_id in sorted(record.id for record in self._agents)]

    def create(self, agent_id: str, policy: str, system: str | None, done: Callable[[Saved], None]) -> None:
        """Make an agent without memory, durably. Raises InvalidRequest, Conflict."""
        self._persistence.save_record(self._agents.new(agent_id, policy=policy, system=system), done)

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
        chain, chains = self._namespace(record.salt).root, []
        for start, saved in zip(range(0, record.num_saved, BLOCK_SIZE), record.chains, strict=False):
            chain = chain_key(chain, record.transcript.ids[start : min(start + BLOCK_SIZE, record.num_saved)])
            if chain != saved:
                break
            chains.append(chain)
        num_saved = record.num_saved if len(chains) == len(record.chains) else len(chains) * BLOCK_SIZE
        return replace(record, num_saved=num_saved, chains=tuple(chains))

    def delete(self, agent_id: str, done: Callable[[Saved], None]) -> None:
        """Forget an agent in RAM and on disk. Raises NotFound."""
        self._persistence.delete_agent(self._agents.get(agent_id), done)

    def evict(self, agent_id: str) -> None:
        """Free the agent's RAM as far as its blocks are on disk and nobody reads them. Raises NotFound."""
        self._persistence.evict_agent(self._agents.get(agent_id))

    def save(self, agent_id: str, done: Callable[[Saved], None]) -> None:
        """Write what of an agent's memory is in RAM but not on disk (after a failed save). Raises NotFound."""
        record = self._agents.get(agent_id)
        prefix = self._prefix(record)
        nodes = prefix.all_nodes
        if prefix.tail is not None and prefix.tail_tokens < prefix.tail.num_tokens:
            nodes = prefix.nodes  # the tail is another agent's
        num_saved = min(prefix.num_tokens, nodes[-1].end) if nodes else 0
        record = replace(record, num_saved=num_saved, chains=tuple(node.chain for node in nodes))
        self._persistence.commit(record, nodes, done)

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
