"""Agents deleted and forked: what the others keep, and names that are taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentcache.errors import Conflict, NotFound
from tests.serving.conversation import TokenTalk, cold_ids, greedy, make_ids, open_llm


@pytest.mark.slow
def test_delete_forgets_in_ram_and_on_disk(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        empty = llm.stats().disk_bytes
        talk.turn(llm, 600)
        llm.delete("alice")
        with pytest.raises(NotFound):
            llm.agent("alice")
        with pytest.raises(NotFound):
            llm.delete("alice")
        assert llm.stats().blocks_cached == 0
    with open_llm(model, tmp_path) as llm:
        assert llm.agents() == []
        [label] = (tmp_path / "agents").rglob("model")  # says whose the folder is, and stays
        assert llm.stats().disk_bytes == empty == label.stat().st_size
        assert talk.turn(llm, 620).report.match == "NEW"


@pytest.mark.slow
def test_deleting_one_of_two_forks_leaves_the_other(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 600)
        disk = llm.stats().disk_bytes
        llm.fork("alice", "bob")
        assert llm.stats().disk_bytes - disk < 20_000
        llm.delete("alice")
        assert llm.agent("bob").cache_state == "hot"
    with open_llm(model, tmp_path) as llm:
        other = talk.fork("bob")
        turn = other.turn(llm, 640)
        assert (turn.report.cache_state, turn.report.match) == ("warm", "EXTEND")
        assert turn.report.computed_tokens < 60
        assert cold_ids(llm, turn.prompt_token_ids, 3) == turn.token_ids


@pytest.mark.slow
def test_names_that_are_taken(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        llm.generate([20, 30], greedy(1), agent="alice")
        llm.generate([20, 31], greedy(1), agent="bob")
        for taken in ("bob", "alice", "BOB"):
            with pytest.raises(Conflict):
                llm.fork("alice", taken)
        with pytest.raises(Conflict):
            llm.generate([20, 30], greedy(1), agent="Alice")
        with pytest.raises(NotFound):
            llm.fork("nobody", "somebody")
        assert [info.id for info in llm.agents()] == ["alice", "bob"]


@pytest.mark.slow
def test_two_new_agents_at_once_whose_names_clash(model: Path, tmp_path: Path) -> None:
    """One of them is refused; the other is saved."""
    with open_llm(model, tmp_path) as llm:

        def one(agent: str) -> str:
            try:
                report = llm.generate(make_ids(30), greedy(8), agent=agent).report
            except Conflict:
                return "conflict"
            return "saved" if report.saved else "not saved"

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(one, ["zoe", "Zoe"])) == ["conflict", "saved"]
        assert len(llm.agents()) == 1
