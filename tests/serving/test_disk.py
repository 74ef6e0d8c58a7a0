"""The owner of the cache folder against a dict: what is durable, which files stay, and what goes for room."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentcache.agents.block_files import Pins
from agentcache.agents.disk import Committed, Disk, SavedTurn
from agentcache.agents.table import DurableLineages
from agentcache.blocks.keys import BASE_CACHE, BlockName, block_key, residual_cache
from agentcache.store.archive import export_agent
from agentcache.store.archived_agent import read_archive
from agentcache.store.manifest import FIRST_LINEAGE, AgentRecord
from agentcache.store.store import BlockWrite, Store
from agentcache.store.verify import verify_folder
from tests.examples import examples
from tests.store.store_cases import (
    MODEL,
    RESIDUAL_SPEC,
    SPEC,
    load_agents,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    size_on_disk,
    tree,
    with_residual,
)

IDS = st.sampled_from(["ada", "bob", "carl"])
LINEAGES = st.sampled_from([FIRST_LINEAGE, "a1"])
BLOCK_BYTES = SPEC.groups[0].bytes_per_block
OTHER_MODEL = "f" * 32


# Residuals of an adapter that is loaded, and of one that is not any more.
OPEN, CLOSED = residual_cache("5e"), residual_cache("6f")


def keys_of(names: Sequence[BlockName] | set[BlockName]) -> set[str]:
    specs = {BASE_CACHE: SPEC, OPEN: RESIDUAL_SPEC, CLOSED: RESIDUAL_SPEC}
    return {block_key(name.chain, specs[name.cache].groups[name.group].name) for name in names}


def writes_of(record: AgentRecord, names: Sequence[BlockName] | set[BlockName]) -> list[BlockWrite]:
    keys = keys_of(names)
    return [write for write in make_turn(record) if write.header.block_key in keys]


@dataclass(eq=False)
class UnderWay:
    """A turn of which some blocks are written already."""

    record: AgentRecord
    held: list[BlockName]


class DiskMachine(RuleBasedStateMachine):
    """`saved` is what has to be durable; a file is there for what its lineages name and turns under way hold."""

    @initialize(blocks=st.sampled_from([6, 8, 12]))
    def start(self, blocks: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.budget = blocks * BLOCK_BYTES
        self.saved: dict[str, AgentRecord] = {}
        self.turns: list[UnderWay] = []
        self.busy: Counter[str] = Counter()
        self.clock = 1.0
        self.fails = ""
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder, SPEC, MODEL, disk_budget=self.budget, fault=self.fault)
        self.pins = Pins()
        records = load_agents(self.store)
        assert {record.name: record for record in records} == self.saved
        self.disk = Disk(self.store, records, self.pins, lambda cache: cache == OPEN)
        self.disk.files.know_cache(OPEN, RESIDUAL_SPEC)
        self.apply(self.disk.tidy())

    def fault(self, step: str) -> None:
        if self.fails and step.startswith(self.fails):
            raise OSError(errno.ENOSPC, "No space left on device")

    def apply(self, outcome: Committed) -> Committed:
        before = dict(self.saved)
        for dropped in (*(reduced.before for reduced in outcome.reduced), *outcome.removed):
            assert dropped.held and dropped.name not in self.busy, "somebody is at work on it"
        for reduced in outcome.reduced:
            assert self.saved[reduced.before.name] == reduced.before
            self.saved[reduced.before.name] = reduced.after
            if reduced.after.held:
                assert reduced.after == reduced.before.without_residual(CLOSED)
        for dropped in outcome.removed:
            assert self.saved[dropped.name] == dropped
            del self.saved[dropped.name]
            assert any(record.id == dropped.id for record in self.saved.values()), "an agent's longest lineage stays"
        if any(each.before.blocks and not each.after.blocks for each in outcome.reduced) or outcome.removed:
            idle = [name for name in before if name not in self.busy and name in self.saved]
            assert not any(self.saved[name].residual_of(CLOSED) for name in idle), "what is of no use now goes first"
        self.disk.clean_up()
        assert not {name for name in outcome.deleted if self.disk.files.has(name)}
        return outcome

    def make(self, agent_id: str, lineage: str, seed: int, num_tokens: int) -> AgentRecord:
        self.clock += 1
        record = make_record(agent_id, make_transcript(num_tokens, seed=seed), lineage=lineage, last_used=self.clock)
        if seed == 1:
            record = with_residual(record, OPEN, num_tokens)
        if seed == 2:  # its adapter goes while the turn is under way
            self.disk.files.know_cache(CLOSED, RESIDUAL_SPEC)
            record = with_residual(record, CLOSED, num_tokens - num_tokens % 256 or num_tokens)
        return record

    # -- turns ------------------------------------------------------------------------------------------------------

    @rule(agent_id=IDS, lineage=LINEAGES, seed=st.integers(0, 2), num_tokens=st.sampled_from([40, 300, 700, 900]))
    def begin(self, agent_id: str, lineage: str, seed: int, num_tokens: int) -> None:
        """A turn begins, and writes its full blocks."""
        record = self.make(agent_id, lineage, seed, num_tokens)
        held = record.block_names[: num_tokens // 256 * len(SPEC.groups)]
        self.busy[record.name] += 1
        self.pins.pin_lineage(record.name)
        self.pins.hold_blocks(held)
        self.turns.append(UnderWay(record, held))
        outcome = self.apply(self.disk.write(writes_of(record, held), held))
        assert outcome.written or outcome.error
        assert not outcome.written or all(map(self.disk.files.has, held))

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), knows_all=st.booleans())
    def commit(self, data: st.DataObject, knows_all: bool) -> None:
        """It ends; blocks that it takes for written may be gone, and then it comes again with all of them."""
        turn = self.take(data)
        names = turn.record.block_names
        counted_on = [name for name in names if name not in turn.held]
        self.pins.hold_blocks(counted_on)
        held = [*turn.held, *counted_on]
        gone = {name for name in names if not self.disk.files.has(name)}
        writes = writes_of(turn.record, gone if knows_all else gone.difference(turn.held))
        outcome = self.apply(self.disk.commit(SavedTurn(turn.record, names, writes, held)))
        if outcome.lost:
            assert not knows_all and gone & set(turn.held)
            outcome = self.apply(self.disk.commit(SavedTurn(turn.record, names, writes_of(turn.record, gone), held)))
        assert not outcome.lost
        if outcome.error is None:
            self.saved[turn.record.name] = turn.record
        else:
            assert "budget" in outcome.error
        self.leave(turn)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        turn = self.take(data)
        self.pins.let_blocks_go(turn.held)
        self.apply(self.disk.sweep(turn.held))
        self.leave(turn)

    def take(self, data: st.DataObject) -> UnderWay:
        return self.turns.pop(data.draw(st.integers(0, len(self.turns) - 1)))

    def leave(self, turn: UnderWay) -> None:
        self.pins.let_lineage_go(turn.record.name)
        self.busy = +(self.busy - Counter([turn.record.name]))

    # -- what clients ask for ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        record = self.saved[data.draw(st.sampled_from(sorted(self.saved)))]
        assert self.apply(self.disk.delete(record)).error is None
        del self.saved[record.name]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def empty(self, data: st.DataObject) -> None:
        record = self.saved[data.draw(st.sampled_from(sorted(self.saved)))]
        less = record.without_blocks()
        error = self.apply(self.disk.empty(less)).error
        assert error is None or ("budget" in error and not record.blocks)
        self.saved[record.name] = less

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), new_id=IDS)
    def fork(self, data: st.DataObject, new_id: str) -> None:
        source = self.saved[data.draw(st.sampled_from(sorted(self.saved)))]
        copy = replace(source, id=new_id)
        if copy.name in self.saved:
            return
        self.pins.pin_lineage(source.name)  # as `AgentOperations.fork` does: else its blocks might go for room
        if self.apply(self.disk.commit(SavedTurn(copy))).error is None:
            self.saved[copy.name] = copy
        self.pins.let_lineage_go(source.name)

    # -- the disk ---------------------------------------------------------------------------------------------------

    @rule(step=st.sampled_from(["block", "log", "manifest"]), agent_id=IDS, seed=st.integers(0, 2))
    def commit_on_a_disk_that_fails(self, step: str, agent_id: str, seed: int) -> None:
        record = self.make(agent_id, FIRST_LINEAGE, seed, 300)
        gone = [name for name in record.block_names if not self.disk.files.has(name)]
        self.pins.hold_blocks(record.block_names)
        self.fails = step
        turn = SavedTurn(record, record.block_names, writes_of(record, gone), record.block_names)
        outcome = self.apply(self.disk.commit(turn))
        self.fails = ""
        self.apply(self.disk.sweep([]))  # what could not be written of those that made room is written now
        if outcome.error is None:  # every block was there
            assert step == "block" and not gone
            self.saved[record.name] = record

    @rule(blocks=st.sampled_from([3, 6, 12]))
    def restart(self, blocks: int) -> None:
        self.store.close()
        self.budget = blocks * BLOCK_BYTES
        self.turns.clear()
        self.busy.clear()
        self.open()

    @invariant()
    def files_are_those_that_somebody_needs(self) -> None:
        named = keys_of({name for record in self.saved.values() for name in record.block_names})
        held = keys_of({name for turn in self.turns for name in turn.held})
        files = {Path(name).stem for name in tree(self.folder) if name.startswith("blocks")}
        assert named <= files <= named | held
        assert self.store.usage.total == size_on_disk(self.folder)
        assert self.store.usage.quarantine.count == 0

    @invariant()
    def manifests_are_what_was_saved(self) -> None:
        report = verify_folder(self.folder)
        assert report.problems == () and report.missing_blocks == 0
        assert report.agents == len({record.id for record in self.saved.values()})

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


DiskMachine.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)
TestDisk = DiskMachine.TestCase


class Drawn:
    """Data whose next draws are known."""

    def __init__(self, *values: object) -> None:
        self._values = iter(values)

    def draw(self, strategy: object) -> object:
        return next(self._values)


def run(*steps: tuple[Callable[..., None], dict[str, object]]) -> None:
    """A machine with room for 12 blocks takes these steps; its invariants hold after each."""
    machine = DiskMachine()
    machine.start(blocks=12)
    try:
        for step, arguments in steps:
            step(machine, **arguments)
            machine.files_are_those_that_somebody_needs()
            machine.manifests_are_what_was_saved()
    finally:
        machine.teardown()


def begin(agent_id: str, lineage: str, num_tokens: int, seed: int) -> tuple[Callable[..., None], dict[str, object]]:
    return DiskMachine.begin, {"agent_id": agent_id, "lineage": lineage, "num_tokens": num_tokens, "seed": seed}


def commit(index: int) -> tuple[Callable[..., None], dict[str, object]]:
    return DiskMachine.commit, {"data": Drawn(index), "knows_all": True}


def fail(agent_id: str, step: str, seed: int) -> tuple[Callable[..., None], dict[str, object]]:
    return DiskMachine.commit_on_a_disk_that_fails, {"agent_id": agent_id, "seed": seed, "step": step}


def test_manifests_of_what_went_come_before_what_takes_the_room() -> None:
    """A disk that fails once leaves them behind; a later write must not leave too little room for them."""
    run(
        begin("carl", FIRST_LINEAGE, 40, 0),
        commit(0),
        begin("ada", "a1", 40, 0),
        begin("ada", FIRST_LINEAGE, 300, 2),
        commit(1),
        commit(0),
        begin("carl", "a1", 700, 1),
        commit(0),
        fail("bob", "manifest", 1),
        begin("bob", "a1", 300, 0),
    )


def test_a_lineage_whose_log_cannot_be_removed_is_gone_with_its_blocks() -> None:
    run(
        begin("carl", FIRST_LINEAGE, 40, 0),
        commit(0),
        begin("ada", FIRST_LINEAGE, 300, 2),
        commit(0),
        begin("carl", "a1", 700, 1),
        commit(0),
        fail("ada", "log", 0),
    )


def test_an_import_that_fails_is_taken_back_as_far_as_the_disk_lets(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with open_store(source) as store:
        for seed, lineage in enumerate((FIRST_LINEAGE, "a1", "b2")):
            record = make_record("ada", make_transcript(300, seed=seed), lineage=lineage)
            store.write_blocks(make_turn(record))
            store.save_agent(record)
    export_agent(source, "ada", tmp_path / "file")
    seen: Counter[str] = Counter()

    def fault(step: str) -> None:
        seen[step] += 1
        if (step, seen[step]) in (("manifest-before-temp", 3), ("delete-before-manifest", 1)):
            raise OSError(errno.ENOSPC, "No space left on device")

    with open_store(target, fault=fault) as store:
        archive, pins = read_archive(tmp_path / "file", SPEC, MODEL, "bob"), Pins()
        pins.hold_blocks(archive.names)
        disk = Disk(store, load_agents(store), pins, lambda cache: True)
        outcome = disk.bring_in(archive)
        assert outcome.error is not None and "save agent bob~b2" in outcome.error
    with open_store(target) as store:
        assert [record.lineage for record in load_agents(store)] == [FIRST_LINEAGE], "the others are gone"
    assert verify_folder(target).missing_blocks == 0


@pytest.mark.parametrize("other_is_older", [True, False])
def test_room_is_made_by_whoever_was_used_longest_ago_of_whatever_model(other_is_older: bool, tmp_path: Path) -> None:
    other = make_record("other", make_transcript(600, seed=1), last_used=2.0 if other_is_older else 4.0)
    own = replace(make_record("own", make_transcript(600, seed=2), last_used=3.0), model=OTHER_MODEL)
    new = replace(make_record("new", make_transcript(600, seed=3), last_used=5.0), model=OTHER_MODEL)
    for model, record in ((MODEL, other), (OTHER_MODEL, own)):
        with open_store(tmp_path, model=model) as store:
            store.write_blocks(make_turn(record))
            store.save_agent(record)
    with open_store(tmp_path, model=OTHER_MODEL, disk_budget=size_on_disk(tmp_path) + BLOCK_BYTES) as store:
        pins = Pins()
        disk = Disk(store, load_agents(store), pins, lambda cache: False)
        assert disk.tidy().error is None
        pins.hold_blocks(new.block_names)
        outcome = disk.commit(SavedTurn(new, new.block_names, make_turn(new), new.block_names))
        assert outcome.error is None
        assert [reduced.before.name for reduced in outcome.reduced] == ([] if other_is_older else ["own"])
        kept = {record.id: any(map(store.has, keys_of(record.block_names))) for record in (other, own, new)}
        assert kept == {"other": not other_is_older, "own": other_is_older, "new": True}
    with open_store(tmp_path) as store:
        assert [record.id for record in load_agents(store)] == ["other"], "its transcript stays"


@pytest.mark.parametrize("cache", [OPEN, CLOSED], ids=["loaded", "not loaded"])
def test_residuals_of_adapters_that_are_not_loaded_go_first(cache: str, tmp_path: Path) -> None:
    old = make_record("old", make_transcript(600, seed=1), last_used=2.0)
    new = with_residual(make_record("new", make_transcript(600, seed=2), last_used=3.0), cache, 600)
    with open_store(tmp_path) as store:
        store.blocks.know_cache(cache, RESIDUAL_SPEC)
        for record in (old, new):
            store.write_blocks(make_turn(record))
            store.save_agent(record)
    with open_store(tmp_path, disk_budget=size_on_disk(tmp_path) - 1) as store:
        disk = Disk(store, load_agents(store), Pins(), lambda name: name == OPEN)
        outcome = disk.tidy()
        assert outcome.error is None and store.usage.free >= 0
        [reduced] = outcome.reduced
        without = new.without_residual(CLOSED) if cache == CLOSED else old.without_blocks()
        assert (reduced.before, reduced.after) == (new if cache == CLOSED else old, without)
    assert verify_folder(tmp_path).missing_blocks == 0


def test_a_turn_that_is_to_be_tried_again_keeps_what_it_holds(tmp_path: Path) -> None:
    record = make_record("a", make_transcript(600))
    with open_store(tmp_path) as store:
        pins = Pins()
        disk = Disk(store, [], pins, lambda cache: False)
        pins.hold_blocks(record.block_names)
        first, *others = make_turn(record)
        outcome = disk.commit(SavedTurn(record, record.block_names, others, record.block_names))
        assert outcome.lost and all(map(pins.has_block, record.block_names))
        outcome = disk.commit(SavedTurn(record, record.block_names, [first], record.block_names))
        assert outcome.error is None and not pins.blocks()
        assert load_agents(store) == [record]


def test_what_another_lineage_still_names_is_not_deleted(tmp_path: Path) -> None:
    first, second = (make_record(name, make_transcript(600)) for name in "ab")
    with open_store(tmp_path) as store:
        disk = Disk(store, [], Pins(), lambda cache: False)
        for record in (first, second):
            assert disk.commit(SavedTurn(record, record.block_names, make_turn(record))).error is None
        shorter = make_record("a", make_transcript(40, seed=1))
        outcome = disk.commit(SavedTurn(shorter, shorter.block_names, make_turn(shorter)))
        disk.clean_up()
        assert outcome.error is None and outcome.deleted == []
        assert all(map(disk.files.has, second.block_names))


def test_room_is_made_of_a_newer_lineage_while_a_turn_extends_the_older_one(ram_path: Path) -> None:
    old = make_record("a", make_transcript(600, seed=1), last_used=2.0)
    new = make_record("b", make_transcript(600, seed=2), last_used=3.0)
    with open_store(ram_path) as store:
        for record in (old, new):
            store.write_blocks(make_turn(record))
            store.save_agent(record)
    with open_store(ram_path, disk_budget=size_on_disk(ram_path) - 1) as store:
        pins = Pins()
        pins.pin_lineage("a")
        outcome = Disk(store, load_agents(store), pins, lambda cache: False).tidy()
        assert outcome.error is None and store.usage.free >= 0
        assert [reduced.before.name for reduced in outcome.reduced] == ["b"]


def test_a_conversation_that_has_grown_is_no_longer_the_first_to_go() -> None:
    lineages = DurableLineages(Pins(), lambda cache: False)
    main = make_record("a", make_transcript(300), last_used=1.0)
    side = make_record("a", make_transcript(900, seed=1), lineage="a1", last_used=2.0)
    for record in (main, side):
        lineages.put(record)
    assert lineages.stalest(now=5.0) is main
    lineages.put(make_record("a", make_transcript(900), last_used=3.0))
    assert lineages.stalest(now=5.0) is side
    lineages.remove(side.name)
    assert lineages.eviction_priority(main, now=5.0) == 4.0
