from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

from agentcache.agents.lineages import eviction_priority, unshared_tokens
from agentcache.agents.pins import Pins, subtract
from agentcache.agents.table import Lineages, names_of
from agentcache.blocks.keys import BlockName
from agentcache.blocks.origin_paths import NamedBlock
from agentcache.store.manifest import AgentRecord


@dataclass(frozen=True)
class Reduced:
    """A lineage before and after some of its blocks were dropped."""

    before: AgentRecord
    after: AgentRecord


class DurableLineages:
    """Durable lineages, reference counts of their blocks, and the order of eviction. Does not touch files.

    Writer thread only, except `is_named`.
    """

    def __init__(self, pins: Pins, is_open: Callable[[str], bool]) -> None:
        self._pins = pins
        self._is_open = is_open
        self._lineages = Lineages()
        self._references: Counter[BlockName] = Counter()
        self._unshared: dict[str, Mapping[str, int]] = {}

    def find(self, name: str) -> AgentRecord | None:
        return self._lineages.find(name)

    def is_named(self, name: BlockName) -> bool:
        return self._references[name] > 0

    def put(self, record: AgentRecord) -> list[BlockName]:
        """Add or replace a lineage; returns the blocks that only the old version named."""
        known = self._lineages.find(record.name)
        self._lineages.put(record)
        return self._recount(record.id, set(known.held) if known else set(), set(record.held))

    def remove(self, name: str) -> list[BlockName]:
        """Remove a lineage; returns the blocks that it named."""
        known = self._lineages.find(name)
        if known is None:
            return []
        self._lineages.remove(known)
        return self._recount(known.id, set(known.held), set())

    def _recount(self, agent_id: str, before: Set[NamedBlock], after: Set[NamedBlock]) -> list[BlockName]:
        self._unshared.pop(agent_id, None)
        self._references.update(names_of(after - before))  # only differences: most blocks of a long context stay
        given_up = names_of(before - after)
        subtract(self._references, given_up)
        return given_up

    def protected_blocks(self) -> set[BlockName]:
        busy = (record for record in self._lineages if self._pins.has_lineage(record.name))
        return self._pins.blocks().union(*(record.block_names for record in busy))

    def latest_use(self) -> float:
        return max((record.last_used for record in self._lineages), default=0.0)

    def stalest(self, now: float) -> AgentRecord | None:
        """The unpinned lineage with blocks and the highest eviction priority."""
        with_blocks = (record for record in self._lineages if record.held)
        idle = (record for record in with_blocks if not self._pins.has_lineage(record.name))
        return max(idle, key=lambda record: self.eviction_priority(record, now), default=None)

    def eviction_priority(self, record: AgentRecord, now: float) -> float:
        if record.id not in self._unshared:
            self._unshared[record.id] = unshared_tokens(self._lineages.lineages(record.id))
        return eviction_priority(record, self._unshared[record.id], now)

    def is_longest(self, record: AgentRecord) -> bool:
        """Whether its agent has no longer lineage; then its transcript stays."""
        return record is self._lineages.get(record.id)

    def first_with_orphans(self) -> Reduced | None:
        """The least recently used unpinned lineage with residuals of unloaded adapters.

        They stay while there is room: the adapter may be loaded again.
        """
        reduced = (
            Reduced(record, self._with_open_residuals(record))
            for record in self._lineages
            if record.residuals and not self._pins.has_lineage(record.name)
        )
        with_orphans = (each for each in reduced if each.after.residuals != each.before.residuals)
        return min(with_orphans, key=lambda each: each.before.last_used, default=None)

    def _with_open_residuals(self, record: AgentRecord) -> AgentRecord:
        return replace(record, residuals=tuple(each for each in record.residuals if self._is_open(each.cache)))
