"""The named agents: what each one's memory is, and which blocks on disk belong to anybody."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from agentcache.blocks.prefix_match import Transcript
from agentcache.errors import Conflict, NotFound
from agentcache.kv.manifest import AgentRecord


class AgentTable:
    """All agents of the served model, by id, and how many of them name each block on disk.

    Args:
        model: fingerprint of the served model.
        records: what the store holds.
    """

    def __init__(self, model: str, records: Iterable[AgentRecord] = ()) -> None:
        self._model = model
        self._records: dict[str, AgentRecord] = {}
        self._references: Counter[str] = Counter()
        self.busy: set[str] = set()
        for record in records:
            self.put(record)

    def __contains__(self, agent_id: str) -> bool:
        return agent_id in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[AgentRecord]:
        return iter(list(self._records.values()))

    def get(self, agent_id: str) -> AgentRecord:
        """The agent; raises NotFound."""
        if agent_id not in self._records:
            raise NotFound(f"there is no agent {agent_id!r}", param="agent", code="agent_not_found")
        return self._records[agent_id]

    def new(self, agent_id: str, *, policy: str = "exact", system: str | None = None) -> AgentRecord:
        """A record without memory for an id not in use; raises Conflict. Not yet put."""
        if agent_id in self._records:
            raise Conflict(f"agent {agent_id!r} exists already", param="id")
        # Manifests are files named by id, and some file systems do not tell upper from lower case.
        if clash := next((other for other in self._records if other.casefold() == agent_id.casefold()), None):
            raise Conflict(f"agent {agent_id!r} differs only by case from agent {clash!r}", param="id")
        now = time.time()
        return AgentRecord(
            id=agent_id,
            model=self._model,
            salt="",
            created=now,
            last_used=now,
            adapter=None,
            policy=policy,
            system=system,
            transcript=Transcript.empty(),
            num_saved=0,
            chains=(),
        )

    def fork(self, agent_id: str, new_id: str) -> AgentRecord:
        """A record with the same memory under a new id; raises NotFound, Conflict. Not yet put."""
        source, blank = self.get(agent_id), self.new(new_id)
        return replace(source, id=new_id, created=blank.created, last_used=blank.last_used)

    def put(self, record: AgentRecord) -> set[str]:
        """Add or replace an agent; returns the chains that nobody names any more."""
        old = self._records.get(record.id)
        self._records[record.id] = record
        self._references.update(record.chains)
        return self._drop(old.chains if old else ())

    def remove(self, agent_id: str) -> set[str]:
        """Forget an agent; returns the chains that nobody names any more."""
        return self._drop(self._records.pop(agent_id).chains)

    def _drop(self, chains: Iterable[str]) -> set[str]:
        self._references.subtract(chains)
        released = {chain for chain in chains if self._references[chain] <= 0}
        for chain in released:
            del self._references[chain]
        return released

    def least_recently_used(self) -> AgentRecord | None:
        """The idle agent with blocks on disk that was used longest ago."""
        idle = [record for record in self if record.chains and record.id not in self.busy]
        return min(idle, key=lambda record: record.last_used, default=None)
