"""A disk that is full, or fails: the turn is answered and says so, and what was saved before stays."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agentcache.errors import DiskBudgetExceeded, StoreError
from agentcache.llm import LLM
from agentcache.store.store import BlockWrite, Store
from agentcache.store.verify import verify_folder
from tests.device_marks import cpu_chunks
from tests.marks import slow
from tests.serving import inside
from tests.serving.by_hand import by_hand
from tests.serving.conversation import (
    BLOCK_BYTES,
    TokenTalk,
    check_idle,
    cold_ids,
    greedy,
    make_ids,
    open_llm,
    outcome,
)


def fail_writes(llm: LLM, wanted: str) -> Callable[[], None]:
    """Every write step whose name begins with `wanted` finds the disk full, until the result is called."""

    def fault(step: str) -> None:
        if step.startswith(wanted):
            raise OSError(errno.ENOSPC, "No space left on device")

    return inside.set_fault(inside.engine_of(llm), fault)


@pytest.mark.parametrize("step", ["block", slow("log"), slow("manifest")])
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


@pytest.mark.parametrize("step", [slow("block"), slow("log"), "manifest"])
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


@cpu_chunks
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("failures", [1, slow(100)])
def test_a_turn_of_which_only_the_first_write_fails(failures: int, is_known: bool, model: Path, tmp_path: Path) -> None:
    """It is saved where the same blocks can be written later; else nothing is promised, whatever else was written.

    Args:
        is_known: whether the turn ends after it has failed; else that write, and all behind it, are still to come.
    """
    first, prompt = make_ids(300, seed=1), make_ids(900, seed=2)
    with by_hand(model, tmp_path) as hand:
        hand.run(hand.submit(first, greedy(3), "alice"))
        before = hand.engine.agents.get("alice").transcript.ids
        disk = BadBlocks(inside.store(hand.engine), failures)
        turn = hand.submit([*before, *prompt], greedy(3), "alice")
        while not turn.generation.output.saved_early:
            hand.step()
        if is_known:
            disk.opened.set()
            inside.flush(hand.engine)
        while not inside.is_saving(hand.engine, turn.generation):
            hand.step()
        disk.opened.set()
        hand.run(turn)
        after = hand.engine.agents.get("alice").transcript.ids
        assert after.tolist() == [*before, *prompt, *turn.token_ids]
        assert disk.written > 0, "later writes went well"
        assert turn.report.saved is (failures == 1)
        assert (turn.report.save_error or "") == ("" if turn.report.saved else "a bad sector")
        assert hand.engine.stats().save_failures == (failures > 1)
    report = verify_folder(tmp_path)
    assert (report.agents, report.missing_blocks, report.unnamed_blocks, report.problems) == (1, 0, 0, ())
    with by_hand(model, tmp_path) as hand:
        kept = hand.engine.agents.get("alice")
        assert kept.transcript.ids == (after if failures == 1 else before)
        assert kept.num_saved == len(kept.transcript) - 1
        again = hand.submit([*kept.transcript.ids, *make_ids(20, seed=3)], greedy(3), "alice")
        hand.run(again)
        assert (again.report.cache_state, again.report.computed_tokens) == ("warm", 21)


class BadBlocks:
    """A disk that waits until it is `opened`, and then does not take the blocks of the first write so many times."""

    def __init__(self, store: Store, failures: int) -> None:
        self.opened = threading.Event()
        self.written = 0
        self._failures = failures
        self._bad: set[str] = set()
        self._write = store.write_blocks
        store.write_blocks = self._write_blocks  # type: ignore[method-assign]

    def _write_blocks(self, blocks: Sequence[BlockWrite]) -> int:
        assert self.opened.wait(30)
        keys = {block.header.block_key for block in blocks}
        self._bad = self._bad or keys
        if self._bad & keys and self._failures:
            self._failures -= 1
            raise StoreError("a bad sector")
        num_bytes = self._write(blocks)
        self.written += 1
        return num_bytes


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_turn_that_does_not_fit_leaves_its_room_to_others(model: Path, tmp_path: Path) -> None:
    """Blocks go to disk while the prompt is computed; those of a turn that then cannot be saved go again."""
    with open_llm(model, tmp_path, disk_budget=6 * BLOCK_BYTES) as llm:
        assert llm.generate(make_ids(2600, seed=1), greedy(1), agent="long").report.saved is False
        assert llm.generate(make_ids(600, seed=2), greedy(1), agent="short").report.saved
    assert verify_folder(tmp_path).unnamed_blocks == 0


@pytest.mark.slow
def test_nobody_makes_room_for_what_can_never_fit(model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path, disk_budget=6 * BLOCK_BYTES) as llm:
        for seed, agent in enumerate(("alice", "bob")):
            assert llm.generate(make_ids(300, seed=seed), greedy(1), agent=agent).report.saved
        turn = llm.generate(make_ids(2600, seed=9), greedy(1), agent="long")
        assert turn.report.saved is False and "budget" in (turn.report.save_error or "")
        assert turn.report.written_bytes == 0
        assert llm.agent("alice").disk_bytes and llm.agent("bob").disk_bytes


@pytest.mark.parametrize("step", ["log", "manifest"])
def test_blocks_of_a_turn_without_a_manifest_go(step: str, model: Path, tmp_path: Path) -> None:
    with open_llm(model, tmp_path) as llm:
        assert llm.generate(make_ids(300, seed=1), greedy(1), agent="alice").report.saved
        repair = fail_writes(llm, step)
        assert not llm.generate(make_ids(900, seed=2), greedy(1), agent="alice").report.saved
        repair()
        assert llm.generate(make_ids(300, seed=3), greedy(1), agent="bob").report.saved
    report = verify_folder(tmp_path)
    assert (report.unnamed_blocks, report.missing_blocks, report.problems) == (0, 0, ())


@pytest.mark.parametrize("is_made", [False, True])
def test_a_turn_that_goes_while_it_waits_for_room(is_made: bool, model: Path, tmp_path: Path) -> None:
    """Cancelled before its write finds no room, nobody makes any; made before that, what was written goes again."""
    opened = threading.Event()
    with by_hand(model, tmp_path) as hand:
        hand.run(hand.submit(make_ids(300, seed=1), greedy(1), "idle"))
        store = inside.store(hand.engine)
        write = store.write_blocks

        tries: list[int] = []

        def once_full(blocks: Sequence[BlockWrite]) -> int:
            assert opened.wait(30)
            tries.append(len(blocks))
            if len(tries) == 1:
                raise DiskBudgetExceeded("it is full")
            return write(blocks)

        store.write_blocks = once_full  # type: ignore[method-assign]
        late = hand.submit(make_ids(700, seed=2), greedy(9), "late")
        while not late.generation.output.saved_early:
            hand.step()
        if is_made:
            opened.set()
            inside.flush(hand.engine)
        hand.engine.cancel(late.generation)
        opened.set()
        hand.finish_writing()
        assert (len(tries) > 1) == is_made
        assert (inside.record(hand.engine, "idle").num_saved > 0) != is_made
    report = verify_folder(tmp_path)
    assert (report.agents, report.blocks > 0, report.unnamed_blocks) == (1, not is_made, 0)


def test_the_engine_does_not_wait_for_room(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's blocks can go, and other models' take their time."""
    opened, in_time = threading.Event(), list[bool]()

    def find_no_room(store: Store, blocks: Sequence[BlockWrite]) -> int:
        raise DiskBudgetExceeded("it is full")

    def evict_slowly(store: Store) -> int:
        in_time.append(opened.wait(60))
        return 0

    monkeypatch.setattr(Store, "write_blocks", find_no_room)
    monkeypatch.setattr(Store, "evict_unreadable", evict_slowly)
    with by_hand(model, tmp_path) as hand:
        alone = hand.submit(make_ids(700, seed=2), greedy(1), "alone")
        while not inside.is_saving(hand.engine, alone.generation):
            hand.step()
        opened.set()
        hand.run(alone)
        assert not alone.report.saved and "full" in (alone.report.save_error or "")
    assert in_time and all(in_time)


def test_blocks_that_another_turn_is_about_to_name_stay(model: Path, tmp_path: Path) -> None:
    """Two turns share a prompt; one is dropped when the other has found the blocks written, and has no manifest yet."""
    prompt = make_ids(700, seed=1)
    with by_hand(model, tmp_path) as hand:
        dropped, kept = hand.submit(prompt, greedy(9), "dropped"), hand.submit([*prompt, 7], greedy(1), "kept")
        while not inside.is_saving(hand.engine, kept.generation):
            hand.step()
        hand.engine.cancel(dropped.generation)
        hand.run(kept)
        assert kept.report.saved
    report = verify_folder(tmp_path)
    assert (report.unnamed_blocks, report.missing_blocks) == (0, 0)
    with by_hand(model, tmp_path) as hand:
        again = hand.submit([*prompt, 7, 8], greedy(1), "kept")
        hand.run(again)
        assert again.report.computed_tokens == 1


def test_blocks_under_way_to_disk_that_are_wanted_again_stay(model: Path, tmp_path: Path) -> None:
    """A client leaves, and asks the same again before the disk has taken what was written for it."""
    prompt, opened = make_ids(700, seed=1), threading.Event()
    with by_hand(model, tmp_path) as hand:
        store = inside.store(hand.engine)
        write = store.write_blocks

        def slowly(blocks: Sequence[BlockWrite]) -> int:
            assert opened.wait(30)
            return write(blocks)

        store.write_blocks = slowly  # type: ignore[method-assign]
        left = hand.submit(prompt, greedy(9), "alice")
        while not left.generation.output.saved_early:
            hand.step()
        hand.engine.cancel(left.generation)
        again = hand.submit(prompt, greedy(1), "alice")
        while not inside.is_saving(hand.engine, again.generation):
            hand.step()
        opened.set()
        hand.run(again)
        assert again.report.saved, again.report.save_error
    report = verify_folder(tmp_path)
    assert (report.agents, report.unnamed_blocks, report.missing_blocks) == (1, 0, 0)
