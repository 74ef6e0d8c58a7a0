"""Workflows against a fake chat: who hears what, histories that only grow, tools, resuming."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.workflow.chat import Message
from agentcache.workflow.parse import read_script
from agentcache.workflow.run import Settings, WorkflowRun, parse_phases, server_agent_id
from agentcache.workflow.script import Agent, Phase, Script, Turn, steps_of
from agentcache.workflow.tools import LookupTable, ToolCall
from agentcache.workflow.transcript import Check, ToolRound, TurnRecord
from tests.workflow.fake_chat import FakeChat, script_of, turns_of


def run_all(script: Script, chat: FakeChat, **settings: Any) -> list[TurnRecord]:
    run = WorkflowRun(script, chat, Settings("s", **settings))
    return [run.take(step) for step in run.pending()]


def last_message(chat: FakeChat) -> str:
    return chat.asked[-1].messages[-1]["content"]


TALK = script_of(
    [
        Turn("ann", "Greet."),
        Turn("bob", "Answer.", sees=("ann",)),
        Turn("ann", "Go on.", sees=("cy",)),
        Turn("cy", "Sum up.", sees=("ann", "bob")),
        Turn("ann", "End.", sees=("bob", "cy")),
    ]
)


def test_what_others_said_arrives_in_the_next_user_message() -> None:
    chat = FakeChat()
    records = run_all(TALK, chat)
    assert records[0].message == "Greet."
    assert records[1].message == f"Ann said: {records[0].text}\n\nAnswer."
    assert records[3].message == (
        f"Ann said: {records[0].text}\n\nBob said: {records[1].text}\n\nAnn said: {records[2].text}\n\nSum up."
    )


def test_each_agent_is_asked_with_its_adapter() -> None:
    chat = FakeChat()
    ann, *others = TALK.agents
    run_all(replace(TALK, agents=(replace(ann, adapter="poet"), *others)), chat)
    assert [question.adapter for question in chat.asked] == ["poet", None, "poet", None, "poet"]


def test_what_was_not_visible_then_is_never_shown_later() -> None:
    records = run_all(TALK, FakeChat())
    assert records[2].message == "Go on."  # Bob had spoken, but this turn sees only Cy
    assert records[4].message == f"Cy said: {records[3].text}\n\nEnd."  # Bob's words lie before Ann's last turn


def test_an_agent_that_said_nothing_is_heard_saying_nothing() -> None:
    chat = FakeChat(answers=["  \n", "Hm."])
    records = run_all(script_of([Turn("ann", "Greet."), Turn("bob", "Answer.", ("ann",))]), chat)
    assert records[1].message == "Ann said nothing.\n\nAnswer."


def test_every_agent_has_its_own_history_and_server_id() -> None:
    chat = FakeChat()
    records = run_all(TALK, chat)
    assert [question.agent for question in chat.asked] == ["s.ann", "s.bob", "s.ann", "s.cy", "s.ann"]
    roles = [message["role"] for message in chat.asked[-1].messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert chat.asked[-1].messages[2]["content"] == records[0].text


@given(turns_of(max_size=24))
def test_every_prompt_extends_the_agents_last_one(turns: list[Turn]) -> None:
    chat = FakeChat()
    records = run_all(script_of(turns), chat)
    seen: dict[str, list[Message]] = {}
    for question, record in zip(chat.asked, records, strict=True):
        before = seen.get(question.agent, [{"role": "system", "content": f"You are {record.speaker}."}])
        assert question.messages[: len(before)] == before
        assert len(question.messages) == len(before) + 1
        seen[question.agent] = [*question.messages, {"role": "assistant", "content": record.text}]


@given(turns_of(max_size=24))
def test_a_message_holds_exactly_the_visible_words_since_the_agents_last_turn(turns: list[Turn]) -> None:
    records = run_all(script_of(turns), FakeChat())
    for index, turn in enumerate(turns):
        own = [earlier for earlier in range(index) if turns[earlier].speaker == turn.speaker]
        since = range(own[-1] + 1 if own else 0, index)
        heard = [
            f"{turns[i].speaker.capitalize()} said: {records[i].text}" for i in since if turns[i].speaker in turn.sees
        ]
        assert records[index].message == "\n\n".join([*heard, turn.prompt])


@given(turns_of(max_size=24), st.data())
def test_resuming_anywhere_sends_what_an_uninterrupted_run_sends(turns: list[Turn], data: st.DataObject) -> None:
    script, whole = script_of(turns), FakeChat()
    records = run_all(script, whole)
    cut = data.draw(st.integers(0, len(turns)))
    rest = FakeChat()
    run = WorkflowRun(script, rest, Settings("s"), records[:cut])
    assert [run.take(step) for step in run.pending()] == records[cut:]
    assert rest.asked == whole.asked[cut:]


def test_a_turn_that_fails_changes_nothing() -> None:
    script = script_of([Turn("ann", "Greet."), Turn("bob", "Answer.", ("ann",))])
    chat = FakeChat(fail_at=1)
    run = WorkflowRun(script, chat, Settings("s"))
    first, second = run.pending()
    run.take(first)
    with pytest.raises(RuntimeError):
        run.take(second)
    chat.fail_at = None
    assert run.pending() == [second]
    run.take(second)
    assert last_message(chat).endswith("Answer.")
    assert run.pending() == []


def test_max_tokens_of_flag_turn_agent_and_script_in_that_order() -> None:
    agents = (Agent("ann", "Ann", max_tokens=3), Agent("bob", "Bob"))
    turns = (Turn("ann", "a", max_tokens=2), Turn("ann", "b"), Turn("bob", "c"))
    script = Script("talk", "A talk", agents, (Phase("one", turns),), max_tokens=4)
    chat = FakeChat()
    run_all(script, chat)
    assert [question.max_tokens for question in chat.asked] == [2, 3, 4]
    chat = FakeChat()
    run_all(script, chat, max_tokens=1)
    assert [question.max_tokens for question in chat.asked] == [1, 1, 1]


def test_sampling_seeds_count_up_by_turn_from_the_scripts_seed() -> None:
    chat = FakeChat()
    run_all(replace(TALK, seed=40, temperature=0.5), chat)
    assert [(question.seed, question.temperature) for question in chat.asked] == [
        (seed, 0.5) for seed in (40, 41, 42, 43, 44)
    ]


def test_forgetting_phases_cuts_their_turns_and_keeps_the_system_prompt() -> None:
    chat = FakeChat()
    records = run_all(TALK, chat, forget_phases=True)
    assert [message["role"] for message in chat.asked[4].messages] == ["system", "user"]
    assert [record.message for record in records] == [question.messages[-1]["content"] for question in chat.asked]
    one_phase = script_of([Turn("ann", "a"), Turn("ann", "b")])
    run_all(one_phase, chat, forget_phases=True)
    assert len(chat.asked[-1].messages) == 4


def test_only_some_phases() -> None:
    run = WorkflowRun(TALK, FakeChat(), Settings("s"))
    assert [step.phase_number for step in run.pending(parse_phases("1-2", TALK))] == [1, 1, 2, 2]
    with pytest.raises(ConfigError, match="phases 2-3 cannot begin before phase 1"):
        run.pending(parse_phases("2-3", TALK))


def test_phases_that_are_done_have_nothing_pending() -> None:
    records = run_all(TALK, FakeChat())
    run = WorkflowRun(TALK, FakeChat(), Settings("s"), records[:2])
    assert run.pending(parse_phases("1", TALK)) == []
    assert len(run.pending(parse_phases("2", TALK))) == 2


@pytest.mark.parametrize("text", ["0", "4", "2-1", "1-4", "a", "1-", "", "1,2"])
def test_phases_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="phases"):
        parse_phases(text, TALK)


def test_a_transcript_of_another_script_is_refused() -> None:
    records = run_all(TALK, FakeChat())
    with pytest.raises(ConfigError, match="more turns than the script"):
        WorkflowRun(script_of(TALK.phases[0].turns), FakeChat(), Settings("s"), records)
    with pytest.raises(ConfigError, match="of another script"):
        WorkflowRun(TALK, FakeChat(), Settings("s"), records[1:])
    with pytest.raises(ConfigError, match="has the script changed since"):
        WorkflowRun(TALK, FakeChat(), Settings("s"), [replace(records[0], message="Something else.")])


def test_sessions_that_make_no_valid_agent_id() -> None:
    assert server_agent_id("pd", "alice") == "pd.alice"
    for session in ("a/b", "x" * 60, "a b"):
        with pytest.raises(ConfigError, match="choose another session"):
            server_agent_id(session, "alice")


BOOK = LookupTable("lookup", "Where each ship lies.", {"Cedar": "north pier"})
CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "Cedar"}}</tool_call>'


def react_script(**turn: Any) -> Script:
    wanted = (ToolCall("lookup", {"key": "Cedar"}),)
    asked = Turn("ann", "Where?", expect=("north pier",), tools=("lookup",), expect_calls=wanted, **turn)
    return replace(script_of([asked, Turn("ann", "Again?"), Turn("bob", "And?", ("ann",))]), tools=(BOOK,))


def test_a_call_is_looked_up_and_the_agent_asked_again() -> None:
    chat = FakeChat(answers=[f"I look.\n{CALL}", "At the north pier.", "As I said.", "Good."])
    records = run_all(react_script(), chat)
    first, second, third, fourth = chat.asked
    assert second.messages == [
        *first.messages,
        {"role": "assistant", "content": f"I look.\n{CALL}"},
        {"role": "tool", "content": "north pier"},
    ]
    assert third.messages[:5] == [*second.messages, {"role": "assistant", "content": "At the north pier."}]
    assert fourth.messages[-1]["content"] == "Ann said: At the north pier.\n\nAnn said: As I said.\n\nAnd?"
    assert [len(question.tools) for question in chat.asked] == [1, 1, 1, 0]
    assert records[0].text == "At the north pier."
    assert records[0].tool_rounds == (ToolRound(f"I look.\n{CALL}", ("north pier",)),)
    assert [check.found for check in records[0].checks] == [True, True]


def test_a_turn_with_calls_costs_the_sum_of_its_answers() -> None:
    record = run_all(react_script(), FakeChat(answers=[CALL, "At the pier.", "a", "b"]))[0]
    assert (record.token_ids, record.completion_tokens, record.computed_tokens) == ((1, 2, 1, 2), 4, 10)
    assert (record.ttft_ms, record.total_ms, record.written_bytes, record.prompt_tokens) == (3.0, 8.0, 198, 30)
    assert record.checks[0] == Check("north pier", False)


def test_an_agent_that_only_calls_is_asked_max_calls_times_again() -> None:
    chat = FakeChat(answers=[CALL] * 3 + ["a", "b"])
    record = run_all(react_script(max_calls=2), chat)[0]
    assert (len(record.tool_rounds), record.text) == (2, CALL)


def test_a_call_in_a_turn_that_may_not_call_is_only_text() -> None:
    chat = FakeChat(answers=["No.", CALL, "Good."])
    records = run_all(react_script(), chat)
    assert (records[1].text, records[1].tool_rounds) == (CALL, ())


def test_resuming_behind_calls_sends_what_an_uninterrupted_run_sends() -> None:
    answers = [CALL, "At the pier.", "As I said.", "Good."]
    whole, rest = FakeChat(answers=answers), FakeChat(answers=answers[2:])
    records = run_all(react_script(), whole)
    run = WorkflowRun(react_script(), rest, Settings("s"), records[:1])
    assert [run.take(step) for step in run.pending()] == records[1:]
    assert rest.asked == whole.asked[2:]


def test_alice_and_bob_cannot_overhear_what_the_other_told_the_warden() -> None:
    script = read_script("prisoners_dilemma")
    records = run_all(script, FakeChat())
    by_place = {(record.phase, record.turn): record for record in records}
    assert "said:" not in by_place[2, 1].message
    secret = f"Bob said: {by_place[1, 3].text}"
    assert not any(secret in record.message for record in records if record.speaker == "alice")
    assert "Alice said:" in by_place[2, 2].message
    assert len(records) == len(steps_of(script))
