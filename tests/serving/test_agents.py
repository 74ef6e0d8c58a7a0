"""The table of agents against a dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentcache.blocks.keys import BlockName
from agentcache.blocks.lanes import NamedBlock
from agentcache.errors import Conflict, InvalidRequest, NotFound
from agentcache.kv.manifest import AgentRecord
from agentcache.serving.agents import AgentTable

IDS = st.sampled_from(["ada", "Ada", "bob", "carl"])
BLOCKS = st.dictionaries(st.sampled_from("uvwxyz"), st.sampled_from([(0,), (1,), (0, 1), (1, 2)])).map(
    lambda blocks: tuple(NamedBlock(chain, groups) for chain, groups in blocks.items())
)


def names_of(blocks: Iterable[NamedBlock]) -> list[BlockName]:
    return [name for block in blocks for name in block.names]


class AgentMachine(RuleBasedStateMachine):
    """`records` is what the table holds; a group's part of a block goes when the last agent or claim lets go."""

    def __init__(self) -> None:
        super().__init__()
        self.table = AgentTable("model")
        self.records: dict[str, AgentRecord] = {}
        self.busy: Counter[str] = Counter()
        self.claims: list[tuple[NamedBlock, ...]] = []

    def named(self) -> Counter[tuple[str, int]]:
        named = (*(record.blocks for record in self.records.values()), *self.claims)
        return Counter((block.chain, group) for blocks in named for block in blocks for group in block.groups)

    @rule(agent_id=IDS, blocks=BLOCKS, last_used=st.integers(0, 9))
    def put(self, agent_id: str, blocks: tuple[NamedBlock, ...], last_used: int) -> None:
        if agent_id not in self.records and self.clashes(agent_id):
            with pytest.raises(Conflict):
                self.table.new(agent_id)
            return
        record = self.table.get(agent_id) if agent_id in self.records else self.table.new(agent_id)
        assert record == self.records.get(agent_id, record)
        before = set(self.named())
        self.records[agent_id] = replace(record, blocks=blocks, last_used=float(last_used))
        assert self.table.put(self.records[agent_id]) == before - set(self.named())

    def clashes(self, agent_id: str) -> bool:
        others = {*self.records, *self.busy} - {agent_id}
        return agent_id.casefold() in {other.casefold() for other in others}

    @precondition(lambda self: self.records)
    @rule(source=IDS, new_id=IDS)
    def fork(self, source: str, new_id: str) -> None:
        if source not in self.records:
            with pytest.raises(NotFound):
                self.table.fork(source, new_id)
        elif new_id in self.records or self.clashes(new_id):
            with pytest.raises(Conflict):
                self.table.fork(source, new_id)
        else:
            fork = self.records[new_id] = self.table.fork(source, new_id)
            assert fork.created > self.records[source].last_used
            assert replace(fork, id=source, created=0, last_used=0) == replace(
                self.records[source], created=0, last_used=0
            )
            assert self.table.put(fork) == set()

    @rule(agent_id=IDS)
    def remove(self, agent_id: str) -> None:
        if agent_id not in self.records:
            with pytest.raises(NotFound):
                self.table.remove(agent_id)
            return
        before = set(self.named())
        del self.records[agent_id]
        assert self.table.remove(agent_id) == before - set(self.named())

    @rule(blocks=BLOCKS)
    def claim(self, blocks: tuple[NamedBlock, ...]) -> None:
        self.claims.append(blocks)
        self.table.claim(names_of(blocks))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        before = set(self.named())
        blocks = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        assert self.table.release(names_of(blocks)) == before - set(self.named())

    @rule(agent_id=IDS, busy=st.booleans())
    def work(self, agent_id: str, busy: bool) -> None:
        if busy:
            self.table.set_busy(agent_id)
            self.busy[agent_id] += 1
        else:
            if self.busy[agent_id]:
                self.table.set_idle(agent_id)
            self.busy = +(self.busy - Counter([agent_id]))

    @invariant()
    def agrees(self) -> None:
        assert {record.id: record for record in self.table} == self.records
        assert len(self.table) == len(self.records)
        assert all((agent_id in self.table) is (agent_id in self.records) for agent_id in ("ada", "Ada", "bob", "carl"))
        assert self.table._references == self.named()

    @invariant()
    def the_oldest_idle_one_with_blocks_goes_first(self) -> None:
        idle = [r for r in self.records.values() if r.blocks and r.id not in self.busy]
        victim = self.table.least_recently_used()
        assert (victim is None) is (not idle)
        if victim is not None:
            assert victim in idle
            assert victim.last_used == min(record.last_used for record in idle)


TestAgents = AgentMachine.TestCase
TestAgents.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_what_the_store_held_is_counted() -> None:
    blank = AgentTable("model").new("a")
    both, lower = NamedBlock("x", (0, 1)), NamedBlock("x", (0,))
    table = AgentTable("model", [replace(blank, blocks=(both,)), replace(blank, id="b", blocks=(lower,))])
    assert table.remove("a") == {("x", 1)}
    assert table.remove("b") == {("x", 0)}


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
        table.remove(record.id)
    assert len(table) == 0
