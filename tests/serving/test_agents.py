"""The table of agents against a dict."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentcache.agents.block_files import Pins
from agentcache.agents.table import AgentTable
from agentcache.blocks.origin_paths import NamedBlock
from agentcache.blocks.transcript import Transcript
from agentcache.errors import Conflict, InvalidRequest, NotFound
from agentcache.store.manifest import FIRST_LINEAGE, AgentRecord, agent_of, lineage_name
from tests.examples import examples

IDS = st.sampled_from(["ada", "Ada", "bob", "carl"])
LINEAGES = st.sampled_from([FIRST_LINEAGE, "a1", "b2"])
BLOCKS = st.dictionaries(st.sampled_from("uvwxyz"), st.sampled_from([(0,), (1,), (0, 1), (1, 2)])).map(
    lambda blocks: tuple(NamedBlock(chain, groups) for chain, groups in blocks.items())
)


class AgentMachine(RuleBasedStateMachine):
    """`records` is what the table holds, `busy` what somebody is at work on."""

    def __init__(self) -> None:
        super().__init__()
        self.pins = Pins()
        self.table = AgentTable("model", pins=self.pins)
        self.records: dict[str, AgentRecord] = {}
        self.busy: Counter[str] = Counter()

    @property
    def ids(self) -> set[str]:
        return {record.id for record in self.records.values()}

    def lineages(self, agent_id: str) -> list[AgentRecord]:
        return [record for record in self.records.values() if record.id == agent_id]

    @rule(agent_id=IDS, lineage=LINEAGES, blocks=BLOCKS, last_used=st.integers(0, 9))
    def put(self, agent_id: str, lineage: str, blocks: tuple[NamedBlock, ...], last_used: int) -> None:
        if agent_id not in self.ids and self.clashes(agent_id):
            for make in (self.table.new, self.table.vacant):
                with pytest.raises(Conflict):
                    make(agent_id)
            return
        name = lineage_name(agent_id, lineage)
        record = self.table.find(name)
        assert record == self.records.get(name)
        if record is None:
            record = replace(self.table.vacant(agent_id), lineage=lineage)
        self.records[name] = replace(record, blocks=blocks, last_used=float(last_used))
        self.table.put(self.records[name])

    def clashes(self, agent_id: str) -> bool:
        others = {*self.ids, *map(agent_of, self.busy)} - {agent_id}
        return agent_id.casefold() in {other.casefold() for other in others}

    @precondition(lambda self: self.records)
    @rule(source=IDS, new_id=IDS)
    def fork(self, source: str, new_id: str) -> None:
        if source not in self.ids:
            with pytest.raises(NotFound):
                self.table.fork(source, new_id)
        elif new_id in self.ids or self.clashes(new_id):
            with pytest.raises(Conflict):
                self.table.fork(source, new_id)
        else:
            forks = self.table.fork(source, new_id)
            assert [replace(fork, id=source, created=0, last_used=0) for fork in forks] == [
                replace(record, created=0, last_used=0) for record in self.lineages(source)
            ]
            for fork in forks:
                self.records[fork.name] = fork
                self.table.put(fork)

    @rule(agent_id=IDS, lineage=LINEAGES)
    def remove(self, agent_id: str, lineage: str) -> None:
        name = lineage_name(agent_id, lineage)
        if name not in self.records:
            with pytest.raises(NotFound):
                self.table.lineages(agent_id, lineage)
            return
        self.table.remove(self.records.pop(name))

    @rule(agent_id=IDS, lineage=LINEAGES, busy=st.booleans())
    def work(self, agent_id: str, lineage: str, busy: bool) -> None:
        name = lineage_name(agent_id, lineage)
        if busy:
            self.pins.pin_lineage(name)
            self.busy[name] += 1
        else:
            if self.busy[name]:
                self.pins.let_lineage_go(name)
            self.busy = +(self.busy - Counter([name]))

    @invariant()
    def agrees(self) -> None:
        assert {record.name: record for record in self.table} == self.records
        assert len(self.table) == len(self.ids)
        assert self.table.ids == sorted(self.ids)
        assert all((agent_id in self.table) is (agent_id in self.ids) for agent_id in ("ada", "Ada", "bob", "carl"))
        assert self.pins.lineages() == list(self.busy)

    @invariant()
    def of_too_many_the_oldest_idle_one_goes_first(self) -> None:
        for agent_id in self.ids:
            lineages = self.lineages(agent_id)
            newest = max(record.last_used for record in lineages)
            idle = [record for record in lineages if record.name not in self.busy]
            surplus = self.table.surplus(agent_id, 2)
            if surplus is None:
                assert len(lineages) <= 2 or not [record for record in idle if record.last_used < newest]
            else:
                assert len(lineages) > 2
                assert surplus.last_used == min(record.last_used for record in idle)


TestAgents = AgentMachine.TestCase
TestAgents.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)


def test_an_agent_is_its_longest_lineage_first() -> None:
    short, long = (
        Transcript.empty().extended("a", [1], [1], "prompt"),
        Transcript.empty().extended("ab", [1, 2], [1, 2], "prompt"),
    )
    blank = AgentTable("model").new("a")
    table = AgentTable("model", [replace(blank, transcript=long), replace(blank, lineage="b", transcript=short)])
    assert table.get("a").lineage == FIRST_LINEAGE
    assert [record.lineage for record in table.lineages("a")] == [FIRST_LINEAGE, "b"]
    with pytest.raises(NotFound, match="no lineage 'c'"):
        table.lineages("a", "c")


def lineages_of(sizes: dict[str, tuple[int, float]], now: float) -> AgentTable:
    """A table with one agent, whose lineages have so many tokens, none in common, and were used so many seconds ago."""
    blank = AgentTable("model").new("a")
    records = []
    for lineage, (tokens, age) in sizes.items():
        ids = list(range(tokens))
        transcript = Transcript.empty().extended("x" * tokens, ids, list(range(1, tokens + 1)), "prompt")
        records.append(
            replace(blank, lineage=lineage, transcript=transcript, num_saved=tokens, last_used=now - age),
        )
    return AgentTable("model", records)


def surplus_of(table: AgentTable, bound: int) -> str | None:
    surplus = table.surplus("a", bound)
    return None if surplus is None else surplus.lineage


def test_the_longest_lineage_outlives_short_ones_however_long_it_is_silent() -> None:
    """Main waits for a slow subagent, while others that are quick follow one another."""
    now = time.time()
    sizes = {"main": (900, 3600.0), "one": (400, 3.0), "two": (400, 2.0), "three": (400, 1.0)}
    assert surplus_of(lineages_of(sizes, now), 3) == "one"
    assert surplus_of(lineages_of(sizes, now), 2) == "one"


def test_where_only_one_may_stay_it_is_the_one_used_last() -> None:
    sizes = {"main": (900, 3600.0), "one": (400, 3.0)}
    assert surplus_of(lineages_of(sizes, time.time()), 1) == "main"


def test_the_longest_waits_for_a_busy_one_to_be_given_up() -> None:
    pins = Pins()
    known = lineages_of({"main": (900, 3600.0), "one": (400, 3.0), "two": (400, 1.0)}, time.time())
    table = AgentTable("model", known, pins=pins)
    pins.pin_lineage(lineage_name("a", "one"))
    assert surplus_of(table, 2) is None
    pins.let_lineage_go(lineage_name("a", "one"))
    assert surplus_of(table, 2) == "one"


def test_another_lineage_is_set_as_the_agent_is() -> None:
    pins = Pins()
    table = AgentTable("model", pins=pins)
    first = replace(table.new("a", policy="auto", system="be kind"), adapter="poet")
    table.put(replace(first, transcript=Transcript.empty().extended("a", [1], [1], "prompt"), num_saved=1))
    other = table.vacant("a")
    assert other.lineage != FIRST_LINEAGE and not other.transcript.ids and other.num_saved == 0
    assert replace(other, lineage=FIRST_LINEAGE) == first
    table.put(other)
    assert table.vacant("a") == other, "an empty one is used first"
    pins.pin_lineage(other.name)
    assert table.vacant("a").lineage not in (FIRST_LINEAGE, other.lineage)


def test_two_first_turns_of_an_agent_are_two_lineages() -> None:
    pins = Pins()
    table = AgentTable("model", pins=pins)
    pins.pin_lineage(table.vacant("a").name)
    assert table.vacant("a").lineage != FIRST_LINEAGE


def test_a_new_agent_has_no_memory() -> None:
    record = AgentTable("model").new("a", policy="exact", system="be kind")
    assert (record.model, record.system, record.num_saved, record.blocks) == ("model", "be kind", 0, ())
    assert len(record.transcript) == 0


@pytest.mark.parametrize("agent_id", ["", ".", "..", "a/b", "ü", "a" * 65])
def test_what_is_no_id(agent_id: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AgentTable("model").new(agent_id, param="agent")
    assert caught.value.param == "agent"


def test_a_table_may_change_while_it_is_walked() -> None:
    table = AgentTable("model")
    for agent_id in ("a", "b"):
        table.put(table.new(agent_id))
    for record in table:
        table.remove(record)
    assert len(table) == 0
