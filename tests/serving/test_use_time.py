"""Which agent was used last is known whatever the system's clock says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.agents.disk import Disk
from agentcache.agents.pins import Pins
from agentcache.agents.table import AgentTable
from agentcache.agents.use_time import shown_time, time_after
from agentcache.store.export import export_agent
from agentcache.store.manifest import MAX_TIME
from tests.kv.store_cases import MODEL, make_record, make_transcript, make_turn, open_store, size_on_disk
from tests.serving.conversation import TokenTalk, open_llm

YEAR = 365 * 86_400.0
OTHER_MODEL = "f" * 32


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have the system's clock be wrong by so many seconds."""
    right = time.time

    def set_clock(wrong_by: float) -> None:
        monkeypatch.setattr(time, "time", lambda: right() + wrong_by)

    return set_clock


@given(clock=st.lists(st.floats(-60 * YEAR, 5000 * YEAR), max_size=20))
def test_uses_are_in_their_order_whatever_the_clock_does(clock: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        table, last = AgentTable("model"), 0.0
        for now in clock:
            patch.setattr(time, "time", lambda now=now: now)
            record = table.new(f"agent{len(table)}")
            assert record.last_used > last and record.last_used >= now
            assert shown_time(record.last_used) <= max(now, 0)
            table.put(record)
            last = record.last_used
            assert time_after(last) > last


@pytest.mark.parametrize("wrong_by", [10 * YEAR, pytest.param(-10 * YEAR, marks=pytest.mark.slow)])
def test_an_agent_that_was_used_while_the_clock_was_wrong(
    wrong_by: float, set_clock: Callable[[float], None], model: Path, tmp_path: Path
) -> None:
    """It is evicted when it is its turn, neither last for ever nor first at once."""
    talks = {name: TokenTalk(name, ids=[10 + number]) for number, name in enumerate(("old", "wrong", "new"))}
    for name, talk in talks.items():
        set_clock(wrong_by if name == "wrong" else 0)
        with open_llm(model, tmp_path) as llm:
            assert talk.turn(llm, 600).report.saved
    for gone in ("old", "wrong"):
        with open_llm(model, tmp_path, disk_budget=size_on_disk(tmp_path) - 1) as llm:
            assert {info.id for info in llm.agents() if not info.disk_bytes} == {gone}
            assert all(info.last_used <= time.time() for info in llm.agents())
            llm.delete(gone)


def test_a_lineage_of_another_model_from_a_clock_that_was_ahead(tmp_path: Path) -> None:
    ahead = make_record("ahead", make_transcript(600, seed=1), last_used=time.time() + 10 * YEAR)
    with open_store(tmp_path) as store:
        store.write_blocks(make_turn(ahead))
        store.save_agent(ahead)
    with open_store(tmp_path, model=OTHER_MODEL) as store:
        store.collect_orphans()
        table = AgentTable(OTHER_MODEL)
        table.note_use(store.latest_use())
        own = replace(make_record("own", make_transcript(600, seed=2)), model=OTHER_MODEL)
        own = replace(own, last_used=table.time_of_use())
        store.write_blocks(make_turn(own))
        store.save_agent(own)
    with open_store(tmp_path, model=OTHER_MODEL, disk_budget=size_on_disk(tmp_path) - 1) as store:
        disk = Disk(store, store.load_agents(), Pins(), lambda cache: False)
        outcome = disk.tidy()
        assert outcome.error is None and not outcome.reduced, "the other model's blocks go"


@pytest.mark.parametrize("now", [-1e9, 1e12, 1e300])
def test_no_clock_makes_a_manifest_that_cannot_be_read(now: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: now)
    table = AgentTable(MODEL)
    for _ in range(3):
        blank = table.new("a")
        assert 0 <= blank.created <= MAX_TIME and 0 <= blank.last_used <= MAX_TIME
        table.note_use(MAX_TIME)


def test_what_comes_from_another_clock_counts_as_used_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do forks. Lineages keep their order, whether the other clock was ahead or behind."""
    table = AgentTable(MODEL)
    table.put(table.new("here"))
    for name, clock in (("a", time.time() - 10 * YEAR), ("b", time.time() + 10 * YEAR), ("c", MAX_TIME)):
        came = [replace(table.new(name), lineage=f"l{age}", last_used=clock - age) for age in (0, 5, 60)]
        known = table.time_of_use()
        first, second, third = table.as_used_now(came)
        assert known < first.last_used <= time.time() + 1 and first.last_used > second.last_used > third.last_used
        for record in (first, second, third):
            table.put(record)


def test_an_archive_of_a_clock_that_was_behind_is_not_evicted_first(
    set_clock: Callable[[float], None], model: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "far.agent"
    set_clock(-10 * YEAR)
    with open_llm(model, tmp_path / "there") as llm:
        TokenTalk("far", ids=[10]).turn(llm, 600)
    export_agent(tmp_path / "there", "far", archive)
    set_clock(0)
    with open_llm(model, tmp_path / "here") as llm:
        TokenTalk("near", ids=[11]).turn(llm, 600)
        llm.import_agent("far", archive)
    with open_llm(model, tmp_path / "here", disk_budget=size_on_disk(tmp_path / "here") - 1) as llm:
        assert [info.id for info in llm.agents() if info.disk_bytes] == ["far"]
