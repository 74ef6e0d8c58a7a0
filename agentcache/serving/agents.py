"""The named agents: what each one's memory is, and which blocks on disk belong to anybody."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from agentcache.blocks.keys import BlockName
from agentcache.blocks.lanes import NamedBlock
from agentcache.blocks.transcript import Transcript
from agentcache.errors import Conflict, InvalidRequest, NotFound
from agentcache.kv.manifest import AgentRecord, valid_id


class AgentTable:
    """All agents of the served model, by id, and how many of them or of their turns need each group's part of a block.

    Args:
        model: fingerprint of the served model.
        records: what the store holds.
    """

    def __init__(self, model: str, records: Iterable[AgentRecord] = ()) -> None:
        self._model = model
        self._records: dict[str, AgentRecord] = {}
        self._references: Counter[BlockName] = Counter()
        self._busy: Counter[str] = Counter()
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

    def new(self, agent_id: str, *, policy: str = "exact", system: str | None = None, param: str = "id") -> AgentRecord:
        """A record without memory for an id not in use. Not yet put.

        Raises:
            InvalidRequest: it is no id.
            Conflict: it is in use, or another one that differs only by case. Both name `param`.
        """
        if not valid_id(agent_id):
            raise InvalidRequest(f"{agent_id!r:.80} is no agent id: use 1 to 64 of A-Z a-z 0-9 . _ -", param=param)
        if agent_id in self._records:
            raise Conflict(f"agent {agent_id!r} exists already", param=param)
        # Manifests are files named by id, and some file systems do not tell upper from lower case.
        if clash := self._clash(agent_id):
            raise Conflict(f"agent {agent_id!r} differs only by case from agent {clash!r}", param=param)
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
            producer=None,
            transcript=Transcript.empty(),
            num_saved=0,
            blocks=(),
        )

    def _clash(self, agent_id: str) -> str | None:
        """An agent, there already or about to be, whose id differs only by case."""
        others = (*self._records, *self._busy)
        return next((other for other in others if other != agent_id and other.casefold() == agent_id.casefold()), None)

    def fork(self, agent_id: str, new_id: str) -> AgentRecord:
        """A record with the same memory under a new id; raises NotFound, Conflict. Not yet put."""
        source, blank = self.get(agent_id), self.new(new_id)
        return replace(source, id=new_id, created=blank.created, last_used=blank.last_used)

    def set_busy(self, agent_id: str) -> None:
        """A request is at work on this agent, which may be about to be made; counts."""
        self._busy[agent_id] += 1

    def set_idle(self, agent_id: str) -> None:
        """One `set_busy` is over."""
        self._busy[agent_id] -= 1
        if self._busy[agent_id] <= 0:
            del self._busy[agent_id]

    def needs(self, name: BlockName) -> bool:
        """Whether some agent names this, or some turn claims it."""
        return self._references[name] > 0

    def claim(self, names: Iterable[BlockName]) -> None:
        """A turn that is not saved yet writes these, or counts on them; they have to stay until its `release`."""
        self._references.update(names)

    def release(self, names: Iterable[BlockName]) -> set[BlockName]:
        """End a claim; returns what nobody names any more."""
        names = list(names)
        self._references.subtract(names)
        released = {name for name in names if self._references[name] <= 0}
        for name in released:
            del self._references[name]
        return released

    def put(self, record: AgentRecord) -> set[BlockName]:
        """Add or replace an agent; returns what nobody names any more."""
        old = self._records.get(record.id)
        before, after = set(old.blocks) if old else set(), set(record.blocks)
        self._records[record.id] = record
        self.claim(names_of(after - before))  # most blocks of a long context stay
        return self.release(names_of(before - after))

    def remove(self, agent_id: str) -> set[BlockName]:
        """Forget an agent; returns what nobody names any more. Raises NotFound."""
        blocks = self.get(agent_id).blocks
        del self._records[agent_id]
        return self.release(names_of(set(blocks)))

    def least_recently_used(self) -> AgentRecord | None:
        """The idle agent with blocks on disk that was used longest ago."""
        idle = [record for record in self if record.blocks and record.id not in self._busy]
        return min(idle, key=lambda record: record.last_used, default=None)


def names_of(blocks: Iterable[NamedBlock]) -> list[BlockName]:
    """All that whoever names these blocks needs on disk."""
    return [name for block in blocks for name in block.names]
