"""Transcripts of agents that are idle leave RAM, and come back when a request names the agent."""

from __future__ import annotations

import errno
import os
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.agents.resident import ResidentTranscripts, transcript_budget
from agentcache.blocks.ledger import TRANSCRIPTS, Ledger
from agentcache.blocks.transcript import Transcript
from agentcache.errors import AgentUnavailable
from agentcache.store.cache_files import CacheFiles
from tests.serving import inside
from tests.serving.conversation import Chat, TokenTalk, goes_on, make_text, open_llm

BUDGET = 10_000
ENGINE = "agentcache-engine"


def make_transcript(num_tokens: int) -> Transcript:
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
        transcript = held[name] = make_transcript(num_tokens)
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
