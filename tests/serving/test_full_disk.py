"""A disk that is full, or fails: the turn is answered and says so, and what was saved before stays."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcache.kv.verify import verify_folder
from agentcache.llm import LLM
from tests.serving.conversation import (
    BLOCK_BYTES,
    TokenTalk,
    check_idle,
    cold_ids,
    engine_of,
    greedy,
    make_ids,
    open_llm,
    outcome,
)


def fail_writes(llm: LLM, wanted: str) -> Callable[[], None]:
    """Every write step whose name begins with `wanted` finds the disk full, until the result is called."""
    store = engine_of(llm).persistence.store
    before = store._blocks._fault, store._agents._fault

    def fault(step: str) -> None:
        if step.startswith(wanted):
            raise OSError(errno.ENOSPC, "No space left on device")

    store._blocks._fault = store._agents._fault = fault

    def repair() -> None:
        store._blocks._fault, store._agents._fault = before

    return repair


@pytest.mark.parametrize("step", ["block", "log", "manifest"])
def test_a_full_disk(step: str, model: Path, tmp_path: Path) -> None:
    """The turn is answered and says that it is not saved; the state saved before survives."""
    with open_llm(model, tmp_path / "kept") as llm:
        kept = TokenTalk()
        expected = [outcome(kept.turn(llm, length)) for length in (300, 560, 600)]
    with open_llm(model, tmp_path / "full") as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        after_first = talk.fork("alice")
        repair = fail_writes(llm, step)
        second = talk.turn(llm, 560)
        assert outcome(second) == expected[1]
        assert second.report.saved is False
        assert "No space left" in (second.report.save_error or "")
        assert llm.stats().save_failures == 1
        check_idle(llm)
        assert outcome(talk.turn(llm, 600)) == expected[2]
        assert llm.stats().save_failures == 2
    with open_llm(model, tmp_path / "full") as llm:
        assert llm.stats().quarantined == 0
        assert llm.agent("alice").tokens == 300
        again = after_first.turn(llm, 560)
        assert outcome(again) == expected[1]
        assert again.report.cache_state == "warm"
        assert again.report.saved
        repair()


@pytest.mark.parametrize("step", ["block", "log", "manifest"])
def test_a_disk_that_works_again(step: str, model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        talk = TokenTalk()
        talk.turn(llm, 300)
        repair = fail_writes(llm, step)
        assert not talk.turn(llm, 560).report.saved
        repair()
        assert talk.turn(llm, 600).report.saved
    with open_llm(model, tmp_path) as llm:
        turn = talk.turn(llm, 640)
        assert turn.report.cache_state == "warm"
        assert turn.report.computed_tokens < 60
        assert cold_ids(llm, turn.prompt_token_ids, 3) == turn.token_ids


def test_a_fork_of_an_agent_whose_last_turn_was_not_saved(model: Path, tmp_path: Path) -> None:
    """What is on disk belongs to a story that the agent has left: the fork's manifest must not name it."""
    with open_llm(model, tmp_path) as llm:
        assert llm.generate(make_ids(600, seed=1), greedy(3), agent="alice").report.saved
        repair = fail_writes(llm, "block")
        assert not llm.generate(make_ids(700, seed=2), greedy(3), agent="alice").report.saved
        repair()
        llm.fork("alice", "twin")
    assert verify_folder(tmp_path).problems == ()
    with open_llm(model, tmp_path) as llm:
        twin = llm.generate(make_ids(700, seed=2), greedy(3), agent="twin")
        assert llm.stats().quarantined == 0
        assert twin.token_ids == cold_ids(llm, twin.prompt_token_ids, 3)


def test_a_disk_budget_that_holds_less_than_a_turn(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, disk_budget=3 * BLOCK_BYTES) as llm:
        talk = TokenTalk()
        assert talk.turn(llm, 300).report.saved
        after_first = talk.fork("alice")
        second = talk.turn(llm, 1200)
        assert second.report.saved is False
        assert "budget" in (second.report.save_error or "")
        assert len(second.token_ids) == 3
        assert llm.stats().disk_bytes <= 3 * BLOCK_BYTES
    with open_llm(model, tmp_path, disk_budget=3 * BLOCK_BYTES) as llm:
        assert after_first.turn(llm, 320).report.cache_state == "warm"
