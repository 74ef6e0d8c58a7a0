"""The lineages that are on disk: which blocks they name, and which of them go when room is needed. Touches no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

from agentcache.agents.in_use import InUse, subtract
from agentcache.agents.lineages import staleness, unshared_tokens
from agentcache.agents.table import Lineages, names_of
from agentcache.blocks.keys import BlockName
from agentcache.blocks.lanes import NamedBlock
from agentcache.store.manifest import AgentRecord


@dataclass(frozen=True)
class Reduced:
    """A lineage before and after some of its blocks went."""

    before: AgentRecord
    after: AgentRecord


class DurableLineages:
    """Belongs to the writer's thread; whether a block `is_named` may be asked from any.

    Args:
        in_use: lineages that somebody is at work on, which stay.
        is_open: whether the cache of that name is in RAM: what is on disk of others cannot be used now.
    """

    def __init__(self, in_use: InUse, is_open: Callable[[str], bool]) -> None:
        self._in_use = in_use
        self._is_open = is_open
        self._lineages = Lineages()
        self._references: Counter[BlockName] = Counter()
        self._unshared: dict[str, Mapping[str, int]] = {}  # of `unshared_tokens`, by agent

    def find(self, name: str) -> AgentRecord | None:
        """The lineage of that name, as it is on disk."""
        return self._lineages.find(name)

    def is_named(self, name: BlockName) -> bool:
        """Whether some lineage names this."""
        return self._references[name] > 0

    def put(self, record: AgentRecord) -> list[BlockName]:
        """Add a lineage, or replace the one of that name; returns what that one named and this one does not."""
        known = self._lineages.find(record.name)
        self._lineages.put(record)
        return self._recount(record.id, set(known.held) if known else set(), set(record.held))

    def remove(self, name: str) -> list[BlockName]:
        """Forget a lineage, if there is one of that name; returns what it named."""
        known = self._lineages.find(name)
        if known is None:
            return []
        self._lineages.remove(known)
        return self._recount(known.id, set(known.held), set())

    def _recount(self, agent_id: str, before: Set[NamedBlock], after: Set[NamedBlock]) -> list[BlockName]:
        self._unshared.pop(agent_id, None)
        self._references.update(names_of(after - before))  # most blocks of a long context stay
        given_up = names_of(before - after)
        subtract(self._references, given_up)
        return given_up

    # -- which go ---------------------------------------------------------------------------------------------------

    def protected_blocks(self) -> set[BlockName]:
        """What may not go: blocks of lineages that somebody is at work on, and what turns count on."""
        busy = (record for record in self._lineages if self._in_use.has_lineage(record.name))
        return self._in_use.blocks().union(*(record.block_names for record in busy))

    def latest_use(self) -> float:
        """When one of them was used last, in seconds since 1970; 0 without any."""
        return max((record.last_used for record in self._lineages), default=0.0)

    def stalest(self, now: float) -> AgentRecord | None:
        """Of those that have blocks and that nobody is at work on, the one with the largest `staleness`."""
        with_blocks = (record for record in self._lineages if record.held)
        idle = (record for record in with_blocks if not self._in_use.has_lineage(record.name))
        return max(idle, key=lambda record: self.staleness(record, now), default=None)

    def staleness(self, record: AgentRecord, now: float) -> float:
        """As `lineages.staleness`; `now` in seconds since 1970, after every use (`use_time`)."""
        if record.id not in self._unshared:
            self._unshared[record.id] = unshared_tokens(self._lineages.lineages(record.id))
        return staleness(record, self._unshared[record.id], now)

    def is_longest(self, record: AgentRecord) -> bool:
        """Whether it is what its agent is known for: its transcript stays when its blocks go."""
        return record is self._lineages.get(record.id)

    def first_with_orphans(self) -> Reduced | None:
        """The lineage used least recently that has residuals of adapters that are not loaded, and that without them.

        None if there is none. They are kept as long as there is room: the adapter may come back. But nothing can be
        done with them now.
        """
        reduced = (
            Reduced(record, self._with_open_residuals(record))
            for record in self._lineages
            if record.residuals and not self._in_use.has_lineage(record.name)
        )
        with_orphans = (each for each in reduced if each.after.residuals != each.before.residuals)
        return min(with_orphans, key=lambda each: each.before.last_used, default=None)

    def _with_open_residuals(self, record: AgentRecord) -> AgentRecord:
        return replace(record, residuals=tuple(each for each in record.residuals if self._is_open(each.cache)))
