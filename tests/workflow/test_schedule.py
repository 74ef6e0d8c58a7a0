"""Turns at the same time: only where they do not hear each other, with the words and order of one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import EngineStopped
from agentcache.workflow.chat import Question, Reply, Restored
from agentcache.workflow.run import Settings, WorkflowRun
from agentcache.workflow.schedule import ONE_BY_ONE, Schedule, take_all
from agentcache.workflow.script import Script, Turn
from agentcache.workflow.transcript import TurnRecord
from tests.workflow.fake_chat import FakeChat, script_of, turns_of

PATIENCE = 20.0


def take(script: Script, chat: Any, pace: Schedule) -> list[TurnRecord]:
    run = WorkflowRun(script, chat, Settings("s"))
    return list(take_all(run, run.pending(), pace))


@given(turns_of(max_size=12), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_several_at_a_time_say_and_ask_what_one_after_the_other_does(
    turns: list[Turn], per_phase: int, parallel: int, prefetch: bool
) -> None:
    script = script_of(turns, per_phase)
    alone, together = FakeChat(), FakeChat()
    expected = take(script, alone, ONE_BY_ONE)
    assert take(script, together, Schedule(parallel, prefetch)) == expected
    by_seed = sorted(together.asked, key=lambda question: question.seed or 0)
    assert by_seed == alone.asked


class Meeting(FakeChat):
    """Each of the named agents' answers waits until all of them have been asked."""

    def __init__(self, *agents: str) -> None:
        super().__init__()
        self._agents = agents
        self._barrier = threading.Barrier(len(agents), timeout=PATIENCE)

    def chat(self, question: Question) -> Reply:
        if question.agent in self._agents:
            self._barrier.wait()
        return super().chat(question)


def test_turns_that_do_not_hear_each_other_run_at_the_same_time() -> None:
    """Mappers meet; the reducer, who hears both, comes after them."""
    script = script_of([Turn("ann", "Map."), Turn("bob", "Map."), Turn("cy", "Reduce.", ("ann", "bob"))], 3)
    chat = Meeting("s.ann", "s.bob")
    records = take(script, chat, Schedule())
    assert [record.speaker for record in records] == ["ann", "bob", "cy"]
    assert chat.asked[2].agent == "s.cy"
    assert records[2].message.startswith("Ann said: ")


def test_one_at_a_time_is_the_scripts_order() -> None:
    chat = FakeChat()
    take(script_of([Turn("cy", "a"), Turn("ann", "b"), Turn("bob", "c")], 3), chat, Schedule(parallel=1))
    assert [question.agent for question in chat.asked] == ["s.cy", "s.ann", "s.bob"]


def test_a_phase_waits_for_the_one_before_it() -> None:
    script = script_of([Turn("ann", "a"), Turn("bob", "b"), Turn("cy", "c")], per_phase=2)
    chat = Meeting("s.ann", "s.bob")
    take(script, chat, Schedule())
    assert chat.asked[2].agent == "s.cy"


class Disk(FakeChat):
    """Agents come from disk; remembers who was restored while whom it was asked for."""

    def __init__(self, restore: Callable[[str], Restored | None]) -> None:
        super().__init__()
        self.restored: list[str] = []
        self._restore = restore
        self._restored_one = threading.Event()

    def chat(self, question: Question) -> Reply:
        if not self.asked:  # long enough that prefetching is done
            self._restored_one.wait(PATIENCE)
        return super().chat(question)

    def restore(self, agent: str) -> Restored | None:
        self.restored.append(agent)
        try:
            return self._restore(agent)
        finally:
            self._restored_one.set()


TALK = script_of([Turn("ann", "a"), Turn("bob", "b", ("ann",)), Turn("cy", "c", ("bob",))], 3)


def test_who_speaks_next_is_restored_meanwhile() -> None:
    chat = Disk(lambda agent: Restored(100, 2.5))
    records = take(TALK, chat, Schedule())
    assert chat.restored[0] == "s.bob"
    assert (records[0].prefetched, records[0].prefetch_ms) == (False, 0.0)
    assert (records[1].prefetched, records[1].prefetch_ms) == (True, 2.5)


@pytest.mark.parametrize("outcome", [None, Restored(0, 0.1)])
def test_what_was_not_on_disk_was_not_prefetched(outcome: Restored | None) -> None:
    assert not any(record.prefetched for record in take(TALK, Disk(lambda agent: outcome), Schedule()))


def test_a_restore_that_fails_is_left_to_the_turn() -> None:
    def fail(agent: str) -> Restored:
        raise EngineStopped("the disk is gone")

    assert len(take(TALK, Disk(fail), Schedule())) == 3


def test_nothing_is_restored_ahead_when_that_is_off() -> None:
    chat = FakeChat()
    chat.restore = lambda agent: pytest.fail("restored")  # type: ignore[method-assign,assignment]
    take(TALK, chat, Schedule(prefetch=False))
    take(TALK, chat, ONE_BY_ONE)


def test_a_turn_that_fails_ends_the_run_with_what_came_before_it() -> None:
    run = WorkflowRun(TALK, FakeChat(fail_at=1), Settings("s"))
    records = take_all(run, run.pending(), Schedule())
    assert next(records).speaker == "ann"
    with pytest.raises(RuntimeError, match="the server is gone"):
        next(records)
    assert [step.turn.speaker for step in run.pending()] == ["bob", "cy"]
