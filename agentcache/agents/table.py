"""Tables of lineages: as of their last turns, and as on disk."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

from agentcache.agents.block_files import Pins, names_of, subtract
from agentcache.agents.lineages import eviction_priority, unshared_tokens
from agentcache.api.names import is_name
from agentcache.api.stats import TRANSCRIPTS
from agentcache.blocks.keys import BlockName
from agentcache.blocks.ledger import UNBOUNDED, Ledger
from agentcache.blocks.origin_paths import NamedBlock
from agentcache.blocks.transcript import Transcript
from agentcache.errors import AgentUnavailable, Conflict, InvalidRequest, NotFound
from agentcache.store.manifest import AgentRecord, agent_of, as_time

_LEAST_TRANSCRIPT_BYTES = 16 << 20
_TRANSCRIPT_SHARE = 64  # divisor of the RAM budget; transcripts get it on top

# Times of use always increase, whatever the clock.
_TIME_STEP = 1e-6  # seconds; about four units of a float's resolution


def transcript_budget(ram_budget: int) -> int:
    return max(_LEAST_TRANSCRIPT_BYTES, ram_budget // _TRANSCRIPT_SHARE)


class ResidentTranscripts:
    """Keeps recently used transcripts in RAM, within a budget; unsaved ones stay. Engine thread only."""

    def __init__(self, ledger: Ledger, budget: int) -> None:
        self._budget = budget
        self._account = ledger.open(TRANSCRIPTS, apart=UNBOUNDED, floor=budget)
        self._kept: OrderedDict[str, tuple[Transcript, int]] = OrderedDict()

    def keep(self, name: str, transcript: Transcript) -> None:
        known, num_bytes = self._kept.get(name, (None, 0))
        if known is not transcript:
            self.forget(name)
            if not transcript.is_kept:
                return
            num_bytes = transcript.content().num_bytes
            self._account.claim(num_bytes)
        self._kept[name] = transcript, num_bytes
        self._kept.move_to_end(name)

    def forget(self, name: str) -> None:
        if name in self._kept:
            _, num_bytes = self._kept.pop(name)
            self._account.release(num_bytes)

    def trim(self, is_needed: Callable[[str], bool]) -> None:
        excess, leaving = self._account.claimed - self._budget, list[str]()
        for name, (transcript, num_bytes) in self._kept.items():
            if excess <= 0:
                break
            if transcript.is_stored and not is_needed(name):
                leaving.append(name)
                excess -= num_bytes
        for name in leaving:
            self._kept[name][0].leave_ram()
            self.forget(name)


def time_now() -> float:
    return as_time(time.time())


def time_after(latest: float) -> float:
    return as_time(max(time.time(), latest + _TIME_STEP, math.nextafter(latest, math.inf)))


def shown_time(last_used: float) -> float:
    return min(last_used, time_now())


class Agents:
    """All lineages of available agents; `unavailable`: reasons by id. A lineage repeats its agent's settings."""

    def __init__(
        self, lineages: dict[str, tuple[AgentRecord, ...]], unavailable: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._lineages = lineages
        self.unavailable = unavailable

    def __contains__(self, agent_id: str) -> bool:
        return agent_id in self._lineages

    def __len__(self) -> int:
        return len(self._lineages)

    def __iter__(self) -> Iterator[AgentRecord]:
        return (record for lineages in list(self._lineages.values()) for record in lineages)

    @property
    def ids(self) -> list[str]:
        return sorted(self._lineages)

    def known(self, agent_id: str | None) -> tuple[AgentRecord, ...]:
        """Return an agent's lineages; empty if unknown. Raises AgentUnavailable."""
        if agent_id is None:
            return ()
        self.require_available(agent_id)
        return self._lineages.get(agent_id, ())

    def require_available(self, agent_id: str, param: str = "agent") -> None:
        if (reason := self.unavailable.get(agent_id)) is not None:
            raise AgentUnavailable(agent_id, reason, param=param)

    def lineages(self, agent_id: str, lineage: str | None = None) -> tuple[AgentRecord, ...]:
        """Return an agent's lineages, or one. Raises NotFound, AgentUnavailable."""
        found = self.known(agent_id)
        if not found:
            raise NotFound(f"there is no agent {agent_id!r}", param="agent", code="agent_not_found")
        if lineage is None:
            return found
        record = next((record for record in found if record.lineage == lineage), None)
        if record is None:
            message = f"agent {agent_id!r} has no lineage {lineage!r:.40}"
            raise NotFound(message, param="lineage", code="lineage_not_found")
        return (record,)

    def get(self, agent_id: str) -> AgentRecord:
        """Return the longest lineage, of equals the last used."""
        return max(self.lineages(agent_id), key=lambda record: (len(record.transcript), record.last_used))

    def count(self, agent_id: str) -> int:
        return len(self.known(agent_id))

    def find(self, name: str) -> AgentRecord | None:
        return next((record for record in self.known(agent_of(name)) if record.name == name), None)


class Lineages(Agents):
    """A mutable table. Belongs to one thread."""

    def __init__(self, records: Iterable[AgentRecord] = ()) -> None:
        super().__init__({})
        for record in records:
            self.put(record)

    def put(self, record: AgentRecord) -> None:
        old, known = self.find(record.name), self._lineages.get(record.id, ())
        if old is None:
            self._lineages[record.id] = (*known, record)
        else:
            self._lineages[record.id] = tuple(record if old is other else other for other in known)
        self._changed(record.id)

    def remove(self, record: AgentRecord) -> None:
        (known,) = self.lineages(record.id, record.lineage)
        left = tuple(other for other in self._lineages[record.id] if other is not known)
        if left:
            self._lineages[record.id] = left
        else:
            del self._lineages[record.id]
        self._changed(record.id)

    def _changed(self, agent_id: str) -> None:
        """Hook for subclasses."""


class AgentTable(Lineages):
    """The agents as of their last turns, saved or not. Engine thread only; other threads get a `view`.

    Without `transcripts`, all stay in RAM. `must_stay`: lineages whose transcript the engine thread needs.
    """

    def __init__(
        self,
        model: str,
        records: Iterable[AgentRecord] = (),
        pins: Pins | None = None,
        transcripts: ResidentTranscripts | None = None,
        must_stay: Container[str] = (),
    ) -> None:
        self._model = model
        self._view: Agents | None = None
        self._pins = pins or Pins()
        self._transcripts = transcripts
        self._latest_use = 0.0
        self._must_stay = must_stay
        super().__init__(records)

    def put(self, record: AgentRecord) -> None:
        super().put(record)
        self.note_use(record.last_used)
        if self._transcripts is not None:
            self._transcripts.keep(record.name, record.transcript)
            self._transcripts.trim(self._is_needed)

    def remove(self, record: AgentRecord) -> None:
        super().remove(record)
        if self._transcripts is not None:
            self._transcripts.forget(record.name)

    def set_aside(self, unavailable: Mapping[str, str]) -> list[AgentRecord]:
        """Make agents unavailable; return their lineages."""
        lineages = [record for record in self if record.id in unavailable]
        for record in lineages:
            self.remove(record)
            if record.transcript.is_stored:
                record.transcript.leave_ram()
        self.unavailable = dict(unavailable)
        self._view = None
        return lineages

    def note_unavailable(self, agent_id: str, reason: str | None) -> None:
        others = {each: why for each, why in self.unavailable.items() if each != agent_id}
        self.unavailable = others if reason is None else others | {agent_id: reason}
        self._view = None

    def _is_needed(self, name: str) -> bool:
        return self._pins.has_lineage(name) or name in self._must_stay

    def view(self) -> Agents:
        if self._view is None:
            self._view = Agents(dict(self._lineages), self.unavailable)
        return self._view

    def note_use(self, last_used: float) -> None:
        self._latest_use = max(self._latest_use, last_used)

    def time_of_use(self) -> float:
        """Return a time after all known uses."""
        self._latest_use = time_after(self._latest_use)
        return self._latest_use

    def as_used_now(self, records: Sequence[AgentRecord]) -> list[AgentRecord]:
        """Shift times so that the latest is now."""
        now, latest = self.time_of_use(), max(record.last_used for record in records)
        # Subtract first: adding a distant year would lose microseconds.
        return [replace(record, last_used=as_time(now - (latest - record.last_used))) for record in records]

    def new(self, agent_id: str, *, policy: str = "exact", system: str | None = None, param: str = "id") -> AgentRecord:
        """Return an empty lineage for an unused id, not added to the table.

        Raises InvalidRequest, AgentUnavailable, Conflict, which name `param`.
        """
        self.require_available(agent_id, param)
        if not is_name(agent_id):
            raise InvalidRequest(f"{agent_id!r:.80} is no agent id: use 1 to 64 of A-Z a-z 0-9 . _ -", param=param)
        if agent_id in self._lineages:
            raise Conflict(f"agent {agent_id!r} exists already", param=param)
        # Some file systems ignore case.
        if clash := self._clash(agent_id):
            raise Conflict(f"agent {agent_id!r} differs only by case from agent {clash!r}", param=param)
        return AgentRecord(
            id=agent_id,
            model=self._model,
            salt="",
            created=time_now(),
            last_used=self.time_of_use(),
            adapter=None,
            policy=policy,
            system=system,
            producer=None,
            transcript=Transcript.empty(),
            num_saved=0,
            blocks=(),
        )

    def _clash(self, agent_id: str) -> str | None:
        others = (*self._lineages, *self.unavailable, *map(agent_of, self._pins.lineages()))
        return next((other for other in others if other != agent_id and other.casefold() == agent_id.casefold()), None)

    def vacant(self, agent_id: str) -> AgentRecord:
        """Return an empty unpinned lineage: an existing one, a new one, or a new agent's first. Raises as `new`."""
        if agent_id not in self._lineages:
            blank = self.new(agent_id, param="agent")
            return self._renamed(blank) if self._pins.has_lineage(blank.name) else blank
        known = self._lineages[agent_id]
        blank_ones = (record for record in known if not record.transcript)
        idle = (record for record in blank_ones if not self._pins.has_lineage(record.name))
        return next(idle, None) or self._renamed(emptied(known[0]))

    @staticmethod
    def _renamed(record: AgentRecord) -> AgentRecord:
        return replace(record, lineage=secrets.token_hex(4))

    def fork(self, agent_id: str, new_id: str, lineage: str | None = None) -> list[AgentRecord]:
        """Return copies under a new id, as if used now; not added to the table. Raises NotFound, Conflict."""
        sources, blank = self.lineages(agent_id, lineage), self.new(new_id)
        return [
            replace(
                source,
                id=new_id,
                created=blank.created,
                transcript=source.transcript.copy(),
            )
            for source in self.as_used_now(sources)
        ]

    def _changed(self, agent_id: str) -> None:
        self._view = None

    def surplus(self, agent_id: str, bound: int) -> AgentRecord | None:
        """Return the idle lineage to evict, if the agent has more than `bound`.

        The last used stays; if `bound` > 1, also the longest: subagents must not evict a main conversation.
        """
        known = self._lineages.get(agent_id, ())
        if len(known) <= bound:
            return None
        newest = max(known, key=lambda record: record.last_used)
        stay = [record.name for record in (newest, self.get(agent_id))[:bound]]
        idle = (record for record in known if record.name not in stay and not self._pins.has_lineage(record.name))
        unshared, now = unshared_tokens(known), self.time_of_use()
        return max(idle, key=lambda record: eviction_priority(record, unshared, now), default=None)


@dataclass(frozen=True)
class Reduced:
    """A lineage before and after blocks were dropped."""

    before: AgentRecord
    after: AgentRecord


class DurableLineages:
    """Durable lineages, references to their blocks, and the order of eviction. Touches no files.

    Writer thread only, except `is_named` and `find`.
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
        """Add or replace a lineage; return the blocks that only the old version named."""
        known = self._lineages.find(record.name)
        self._lineages.put(record)
        return self._recount(record.id, set(known.held) if known else set(), set(record.held))

    def remove(self, name: str) -> list[BlockName]:
        """Remove a lineage; return the blocks that it named."""
        known = self._lineages.find(name)
        if known is None:
            return []
        self._lineages.remove(known)
        return self._recount(known.id, set(known.held), set())

    def _recount(self, agent_id: str, before: Set[NamedBlock], after: Set[NamedBlock]) -> list[BlockName]:
        self._unshared.pop(agent_id, None)
        self._references.update(names_of(after - before))  # differences: most blocks stay
        given_up = names_of(before - after)
        subtract(self._references, given_up)
        return given_up

    def protected_blocks(self) -> set[BlockName]:
        busy = (record for record in self._lineages if self._pins.has_lineage(record.name))
        return self._pins.blocks().union(*(record.block_names for record in busy))

    def latest_use(self) -> float:
        return max((record.last_used for record in self._lineages), default=0.0)

    def stalest(self, now: float) -> AgentRecord | None:
        with_blocks = (record for record in self._lineages if record.held)
        idle = (record for record in with_blocks if not self._pins.has_lineage(record.name))
        return max(idle, key=lambda record: self.eviction_priority(record, now), default=None)

    def eviction_priority(self, record: AgentRecord, now: float) -> float:
        if record.id not in self._unshared:
            self._unshared[record.id] = unshared_tokens(self._lineages.lineages(record.id))
        return eviction_priority(record, self._unshared[record.id], now)

    def is_longest(self, record: AgentRecord) -> bool:
        """Whether none of its agent's is longer: then its transcript stays."""
        return record is self._lineages.get(record.id)

    def first_with_orphans(self) -> Reduced | None:
        """Return the stalest unpinned lineage with residuals of unloaded adapters, and its state without them."""
        reduced = (
            Reduced(record, self._with_open_residuals(record))
            for record in self._lineages
            if record.residuals and not self._pins.has_lineage(record.name)
        )
        with_orphans = (each for each in reduced if each.after.residuals != each.before.residuals)
        return min(with_orphans, key=lambda each: each.before.last_used, default=None)

    def _with_open_residuals(self, record: AgentRecord) -> AgentRecord:
        return replace(record, residuals=tuple(each for each in record.residuals if self._is_open(each.cache)))


def reasons_by_agent(lineages: Mapping[str, str]) -> dict[str, str]:
    # One unreadable lineage suffices: without it, a turn would restart a conversation.
    reasons: dict[str, str] = {}
    for name, reason in lineages.items():
        reasons.setdefault(agent_of(name), reason)
    return reasons


def emptied(record: AgentRecord) -> AgentRecord:
    return replace(record.without_blocks(), salt="", producer=None, transcript=Transcript.empty())


def blocks_of(records: Sequence[AgentRecord]) -> set[NamedBlock]:
    return {block for record in records for block in record.held}
