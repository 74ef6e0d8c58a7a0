"""The store against a dict, over thousands of random steps."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentcache.blocks.transcript import Transcript
from agentcache.store.manifest import MAX_TIME
from agentcache.store.store import AgentRecord, Store
from tests.examples import examples
from tests.store.store_cases import (
    BUDGET,
    MODEL,
    SPEC,
    load_agents,
    make_block,
    make_record,
    make_transcript,
    make_turn,
    size_on_disk,
    tree,
)

IDS = st.sampled_from(["a", "b", "a.1", "a.1.log"])


class StoreMachine(RuleBasedStateMachine):
    """`agents` and `blocks` are what the store must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.agents: dict[str, AgentRecord] = {}
        self.blocks: set[str] = set()

    @initialize()
    def open(self) -> None:
        self.store = Store(self.folder, SPEC, MODEL, disk_budget=BUDGET)

    def _save(self, record: AgentRecord) -> None:
        turn = make_turn(record)
        self.store.write_blocks(turn)
        self.store.save_agent(record)
        self.agents[record.name] = record
        self.blocks |= {block.header.block_key for block in turn}

    @rule(agent_id=IDS, num_tokens=st.integers(0, 300), seed=st.integers(0, 2), system=st.none() | st.text(max_size=5))
    def diverge(self, agent_id: str, num_tokens: int, seed: int, system: str | None) -> None:
        self._save(make_record(agent_id, make_transcript(num_tokens, seed=seed), system=system))

    @rule(agent_id=IDS, more=st.integers(0, 40), text=st.text(min_size=1, max_size=4))
    def extend(self, agent_id: str, more: int, text: str) -> None:
        old = self.agents.get(agent_id)
        before = old.transcript if old else Transcript.empty()
        ends = [len(text)] * more if more else []
        added = before.extended(text, range(more), ends, "generated") if more else before
        self._save(make_record(agent_id, added, num_saved=len(added.ids) // 2))

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), share=st.floats(0, 1))
    def cut_back(self, data: st.DataObject, share: float) -> None:
        record = self.agents[data.draw(st.sampled_from(sorted(self.agents)))]
        transcript = record.transcript.cut(int(share * len(record.transcript.ids)))
        self._save(make_record(record.id, transcript, adapter="x"))

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), when=st.floats(0, MAX_TIME))
    def touch(self, data: st.DataObject, when: float) -> None:
        record = self.agents[data.draw(st.sampled_from(sorted(self.agents)))]
        self._save(replace(record, last_used=when))

    @rule(agent_id=IDS)
    def delete_agent(self, agent_id: str) -> None:
        self.store.delete_agent(agent_id)
        self.agents.pop(agent_id, None)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def delete_unnamed_block(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.blocks)))
        if key not in self._named():
            assert self.store.delete_blocks([key]) > 0
            self.blocks.discard(key)

    @rule(token=st.integers(0, 5))
    def write_orphan(self, token: int) -> None:
        block = make_block((token, 7))
        self.store.write_blocks([block])
        self.blocks.add(block.header.block_key)

    @rule(collect=st.booleans())
    def restart(self, collect: bool) -> None:
        self.store.close()
        self.open()
        assert {record.name: record for record in load_agents(self.store)} == self.agents
        if collect:
            assert self.store.collect_orphans() == len(self.blocks - self._named())
            self.blocks &= self._named()

    def _named(self) -> set[str]:
        return {block.header.block_key for record in self.agents.values() for block in make_turn(record)}

    @invariant()
    def bytes_and_files_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.usage.total == size_on_disk(self.folder)
        assert self.store.usage.quarantine.count == 0
        assert all(self.store.has(key) for key in self.blocks)
        names = tree(self.folder)
        assert len([name for name in names if name.startswith("blocks")]) == len(self.blocks)
        assert len([name for name in names if name.startswith("agents")]) == 2 * len(self.agents)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase
