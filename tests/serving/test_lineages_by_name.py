"""Lineages of an agent that requests name: gone on from, emptied, deleted; and what holds for all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentcache.errors import NotFound
from agentcache.gateway.operations import CreateAgent, DeleteAgent, ShowAgent
from agentcache.store.verify import verify_folder
from tests.serving import inside
from tests.serving.conversation import (
    Stream,
    TokenTalk,
    goes_on,
    greedy,
    make_ids,
    make_text,
    manifests,
    open_llm,
)
from tests.serving.gate import Gate


@pytest.mark.slow
def test_a_lineage_by_name(model: Path, tmp_path: Path) -> None:
    talks = [TokenTalk(ids=make_ids(270, seed=seed)) for seed in range(2)]
    with open_llm(model, tmp_path) as llm:
        names = [talk.turn(llm, 300 + 40 * number).report.lineage for number, talk in enumerate(talks)]
        forked = llm.fork("alice", "one", names[0])
        assert [(lineage.id, lineage.tokens) for lineage in forked.lineages] == [(names[0], 300)]
        both = llm.fork("alice", "both")
        assert [lineage.tokens for lineage in both.lineages] == [300, 340] and both.tokens == 340
        llm.evict("alice")
        assert llm.restore("alice", names[0]).tokens == 300
        assert llm.agent("alice").cache_state == "warm", "the longest one is not in RAM"
        assert llm.restore("alice").tokens == 340
        assert llm.agent("alice").cache_state == "hot"
        llm.delete("alice", names[1])
        assert [lineage.id for lineage in llm.agent("alice").lineages] == [names[0]]
        with pytest.raises(NotFound, match="has no lineage"):
            llm.delete("alice", names[1])
        goes_on(talks[0].turn(llm, 320), 300)
        llm.delete("alice", names[0])
        empty = llm.agent("alice")
        assert (empty.tokens, empty.ram_bytes, empty.disk_bytes, len(empty.lineages)) == (0, 0, 0, 1)
    with open_llm(model, tmp_path) as llm:
        assert llm.agent("alice").tokens == 0
        goes_on(talks[1].fork("both").turn(llm, 360), 340)
        llm.delete("alice")
        llm.delete("both")
        llm.delete("one")
    assert manifests(tmp_path) == {} and verify_folder(tmp_path).blocks == 0


def test_going_on_from_a_lineage_by_name(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        ids = make_ids(300)
        first = llm.generate(ids, greedy(4), agent="alice").report.lineage
        other = llm.generate(ids, greedy(4, logit_bias={17: 50.0}), agent="alice").report.lineage
        assert first != other
        report = llm.generate(ids, greedy(0), agent="alice", lineage=first).report
        assert report.cached_tokens.own == 299
        with pytest.raises(NotFound):
            llm.generate(ids, greedy(4), agent="alice", lineage="nope")


@pytest.mark.slow
def test_settings_of_the_agent_hold_for_every_lineage(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        system = make_text(20, seed=8)
        inside.on_loop(llm, inside.async_engine(llm).call(CreateAgent("alice", system=system)))
        for seed in range(2):
            llm.chat([{"role": "user", "content": make_text(100, seed=seed)}], greedy(2), agent="alice")
        records = inside.records(inside.engine_of(llm), "alice")
        assert len(records) == 2 and {record.system for record in records} == {system}
        assert all(record.transcript.text.find(system) >= 0 for record in records)


def test_an_empty_lineage_by_name(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        inside.on_loop(llm, inside.async_engine(llm).call(CreateAgent("alice")))
        first = llm.generate(make_ids(100), greedy(3), agent="alice", lineage="first").report
        assert (first.lineage, first.match, first.lost_tokens) == ("first", "NEW", 0)
        llm.delete("alice", "first")
        report = llm.chat([{"role": "user", "content": "Hi"}], greedy(3), agent="alice", lineage="first").report
        assert report.lineage == "first" and report.saved


def test_a_lineage_by_name_with_another_salt_shares_nothing(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        ids = make_ids(200)
        llm.generate(ids, greedy(3), agent="alice", salt="one")
        report = llm.generate(ids, greedy(3), agent="alice", salt="two", lineage="first").report
        assert (report.computed_tokens, report.lost_tokens) == (200, 0)
        assert report.lineage != "first"


def test_a_lineage_that_is_being_saved_is_deleted_when_it_is(model: Path, tmp_path: Path) -> None:
    """Not before: the save would bring it back."""
    with open_llm(model, tmp_path) as llm:
        llm.generate(make_ids(100), greedy(3), agent="alice")

        async def run() -> None:
            gate = await inside.on_thread(inside.async_engine(llm), Gate.of)
            stream = Stream(llm, make_ids(100, seed=1), max_tokens=3)
            await gate.reached()
            while len(known := (await inside.async_engine(llm).call(ShowAgent("alice"))).lineages) < 2:
                await asyncio.sleep(0.001)
            deleting = asyncio.ensure_future(inside.async_engine(llm).call(DeleteAgent("alice", known[1].id)))
            await asyncio.sleep(0.05)
            assert not deleting.done()
            gate.opened.set()
            await asyncio.gather(stream.task, deleting)

        inside.on_loop(llm, run())
        assert [lineage.id for lineage in llm.agent("alice").lineages] == ["first"]
    assert list(manifests(tmp_path)) == ["alice"]
