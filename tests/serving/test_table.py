"""The agents as the engine knows them: their views, times of use, transcripts in RAM, and which lineage goes first."""

from __future__ import annotations

import errno
import os
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.agents.block_files import Pins
from agentcache.agents.disk import Disk
from agentcache.agents.table import AgentTable, ResidentTranscripts, shown_time, time_after, transcript_budget
from agentcache.api.stats import TRANSCRIPTS
from agentcache.blocks.ledger import Ledger
from agentcache.blocks.transcript import Transcript
from agentcache.errors import AgentUnavailable
from agentcache.store.archive import export_agent
from agentcache.store.cache_files import CacheFiles
from agentcache.store.manifest import MAX_TIME
from tests.serving import inside
from tests.serving.conversation import Chat, TokenTalk, goes_on, make_text, open_llm
from tests.store.store_cases import (
    MODEL,
    load_agents,
    make_record,
    make_transcript,
    make_turn,
    open_store,
    size_on_disk,
)

YEAR = 365 * 86_400.0
OTHER_MODEL = "f" * 32

BUDGET = 10_000
ENGINE = "agentcache-engine"


def test_a_view_is_of_the_moment_it_is_asked_for() -> None:
    table = AgentTable(MODEL)
    before = table.view()
    record = make_record("ann", make_transcript(20))
    table.put(record)
    assert (before.find("ann"), table.view().find("ann")) == (None, record)
    table.remove(record)
    assert table.view().find("ann") is None


def test_the_longest_lineage_and_the_one_used_last_stay() -> None:
    table = AgentTable(MODEL)
    main = make_record("ann", make_transcript(600), last_used=1.0)
    short = make_record("ann", make_transcript(30, seed=1), lineage="b", last_used=time.time() - 2)
    newest = replace(make_record("ann", make_transcript(30, seed=2), lineage="c"), last_used=time.time() - 1)
    for record in (main, short, newest):
        table.put(record)
    assert table.surplus("ann", 2) is short
    table.remove(short)
    assert table.surplus("ann", 2) is None and table.surplus("ann", 1) is main


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
        disk = Disk(store, load_agents(store), Pins(), lambda cache: False)
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


def numbered(num_tokens: int) -> Transcript:
    ids = array("I", range(num_tokens))
    return Transcript("x" * num_tokens, ids, array("I", [each + 1 for each in ids]), (("prompt", num_tokens),))


@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.sampled_from(["new", "saved", "busy", "gone"]), st.integers(0, 900))
    )
)
def test_transcripts_keep_to_their_budget_but_for_those_that_have_to_stay(steps: list[tuple[str, str, int]]) -> None:
    ledger = Ledger(1)
    resident = ResidentTranscripts(ledger, BUDGET)
    [account] = ledger.accounts
    held: dict[str, Transcript] = {}
    for name, what, num_tokens in steps:
        held.pop(name, None)
        if what == "gone":
            resident.forget(name)
            continue
        transcript = held[name] = numbered(num_tokens)
        content = transcript.content()
        if what != "new":
            transcript.store_in(lambda content=content: content)  # type: ignore[misc]
        resident.keep(name, transcript)
        busy = name if what == "busy" else None
        resident.trim(lambda other, busy=busy: other == busy)  # type: ignore[misc]
        kept = {other: each for other, each in held.items() if each.is_kept}
        assert account.claimed == sum(each.content().num_bytes for each in kept.values())
        stuck = [other for other, each in kept.items() if other == busy or not each.is_stored]
        assert account.claimed <= BUDGET or stuck == list(kept)


def test_the_budget_is_a_share_of_the_ram_budget() -> None:
    assert transcript_budget(8 << 30) == 128 << 20
    assert transcript_budget(1 << 20) == 16 << 20


def test_idle_agents_transcripts_leave_ram_and_come_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.keep_few_transcripts(monkeypatch, BUDGET)
    readers = inside.watch_logs(monkeypatch)
    talks = [TokenTalk(f"agent-{number}") for number in range(6)]
    with open_llm(model, tmp_path) as llm:
        for talk in talks:
            talk.turn(llm, 300)
        engine = inside.engine_of(llm)
        used, counted = inside.transcript_bytes(engine)
        assert 0 < used == counted <= BUDGET
        assert [account.used_bytes for account in llm.stats().ram_accounts if account.kind == TRANSCRIPTS] == [used]
        assert not readers
        assert [agent.tokens for agent in llm.agents()] == [300] * 6, "a list reads no log"
        assert {agent.cache_state for agent in llm.agents()} == {"hot"}
        llm.evict("agent-1")
        assert llm.restore("agent-1").tokens == 300 and llm.agent("agent-1").cache_state == "hot"
        assert not readers
        for talk in talks:
            goes_on(talk.turn(llm, 340), 300)
        assert readers and ENGINE not in readers
        assert llm.fork("agent-0", "copy").tokens == 340
        goes_on(talks[0].fork("copy").turn(llm, 360), 340)
        llm.delete("agent-0")
        goes_on(talks[0].fork("copy").turn(llm, 350), 340)
        inside.flush(engine)
        used, counted = inside.transcript_bytes(engine)
        assert used == counted <= BUDGET
    with open_llm(model, tmp_path) as llm:
        used, counted = inside.transcript_bytes(inside.engine_of(llm))
        assert used == counted <= BUDGET
        for talk in talks[1:]:
            goes_on(talk.turn(llm, 380), 340)
        assert {agent.cache_state for agent in llm.agents()} == {"hot", "warm"}
    assert ENGINE not in readers


def test_a_chat_continues_warm_after_its_transcript_has_left_ram(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.keep_few_transcripts(monkeypatch, 0)
    readers = inside.watch_logs(monkeypatch)
    chat, other = Chat("alice"), Chat("bob")
    with open_llm(model, tmp_path) as llm:
        chat.turn(llm, make_text(300))
        other.turn(llm, make_text(30, seed=1))
        before = llm.agent("alice").tokens
        again = chat.turn(llm, "And now?")
        goes_on(again, before)
        assert (again.report.match, again.report.lineage) == ("EXTEND", "first")
        assert not inside.record(inside.engine_of(llm), "bob").transcript.is_in_ram
    assert ENGINE not in readers


def test_a_log_that_cannot_be_read_for_now_makes_the_agent_unavailable(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.keep_few_transcripts(monkeypatch, 0)
    talk, read = TokenTalk(), CacheFiles.read

    def fail(files: CacheFiles, path: Path, max_bytes: int) -> bytes:
        if path.suffix == ".log":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(files, path, max_bytes)

    with open_llm(model, tmp_path) as llm:
        talk.turn(llm, 300)
        llm.generate([1, 2, 3], agent="bob")
        with monkeypatch.context() as patch:
            patch.setattr(CacheFiles, "read", fail)
            with pytest.raises(AgentUnavailable, match="alice"):
                talk.fork("alice").turn(llm, 320)
            assert llm.agent("alice").tokens == 300
        goes_on(talk.turn(llm, 330), 300)


def test_a_log_that_is_gone_costs_its_lineage_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.keep_few_transcripts(monkeypatch, 0)
    talk = TokenTalk()
    with open_llm(model, tmp_path) as llm:
        talk.turn(llm, 300)
        llm.generate([1, 2, 3], agent="bob")
        [log] = tmp_path.glob("agents/*/alice.1.log")
        log.rename(tmp_path / "aside")
        aside = talk.fork("alice").turn(llm, 320)
        assert aside.report.lineage != "first" and aside.report.saved, "answered without it"
        assert llm.restore("alice", "first").tokens == 300
        (tmp_path / "aside").rename(log)
        assert len(llm.agent("alice").lineages) == 2
        llm.delete("alice", aside.report.lineage)
        continued = talk.turn(llm, 330)
        goes_on(continued, 300)
        assert continued.report.lineage == "first"
