"""Workflows against a fake chat: who hears what, histories that only grow, resuming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.serving.request import CachedTokens, CacheState, Match, Report, SamplingParams
from agentcache.workflow.run import (
    Conversation,
    LLMChat,
    Message,
    Reply,
    Settings,
    WorkflowRun,
    parse_phases,
    server_agent_id,
)
from agentcache.workflow.script import Agent, Phase, Script, Turn, read_script, steps_of
from agentcache.workflow.transcript import TurnRecord, from_json, read_transcript, write_transcript

IDS = ("ann", "bob", "cy")
REPORT = {
    "match": "EXTEND",
    "cache_state": "hot",
    "prompt_tokens": 30,
    "cached_tokens": {"own": 20, "shared": 5, "residual": 0},
    "computed_tokens": 5,
    "time_to_first_token_ms": 2.0,
    "restored_bytes": 0,
    "restore_ms": 0.0,
    "written_bytes": 99,
}


class FakeChat:
    """Answers with a number and remembers what it was asked."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.fail_at = fail_at

    def chat(
        self, agent: str, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Reply:
        if len(self.calls) == self.fail_at:
            raise RuntimeError("the server is gone")
        call = {"agent": agent, "messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        self.calls.append(call | {"seed": seed})
        text = f"word {sum(len(message['content']) for message in messages)}"
        return Reply(text, (1, 2), REPORT, 2, 3.0, 4.0)


def script_of(turns: Sequence[Turn], per_phase: int = 2) -> Script:
    phases = [turns[start : start + per_phase] for start in range(0, len(turns), per_phase)]
    return Script(
        name="talk",
        title="A talk",
        agents=tuple(Agent(id, id.capitalize(), f"You are {id}.") for id in IDS),
        phases=tuple(Phase(f"phase {number}", tuple(phase)) for number, phase in enumerate(phases)),
    )


def run_all(script: Script, chat: FakeChat, **settings: Any) -> list[TurnRecord]:
    run = WorkflowRun(script, chat, Settings("s", **settings))
    return [run.take(step) for step in run.pending()]


def last_message(chat: FakeChat) -> str:
    return str(chat.calls[-1]["messages"][-1]["content"])


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


def test_what_was_not_visible_then_is_never_shown_later() -> None:
    records = run_all(TALK, FakeChat())
    assert records[2].message == "Go on."  # Bob had spoken, but this turn sees only Cy
    assert records[4].message == f"Cy said: {records[3].text}\n\nEnd."  # Bob's words lie before Ann's last turn


def test_an_agent_that_said_nothing_is_heard_saying_nothing() -> None:
    conversation = Conversation(TALK)
    conversation.add(TALK.phases[0].turns[0], "Greet.", "  \n")
    assert conversation.message_for(TALK.phases[0].turns[1]).startswith("Ann said nothing.")


def test_every_agent_has_its_own_history_and_server_id() -> None:
    chat = FakeChat()
    records = run_all(TALK, chat)
    assert [call["agent"] for call in chat.calls] == ["s.ann", "s.bob", "s.ann", "s.cy", "s.ann"]
    roles = [message["role"] for message in chat.calls[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert chat.calls[-1]["messages"][2]["content"] == records[0].text


turns_strategy = st.lists(
    st.builds(
        lambda speaker, sees, prompt: Turn(IDS[speaker], prompt, tuple(IDS[i] for i in sorted(sees) if i != speaker)),
        st.integers(0, 2),
        st.sets(st.integers(0, 2)),
        st.text(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=24,
)


@given(turns_strategy)
def test_every_prompt_extends_the_agents_last_one(turns: list[Turn]) -> None:
    chat = FakeChat()
    records = run_all(script_of(turns), chat)
    seen: dict[str, list[Message]] = {}
    for call, record in zip(chat.calls, records, strict=True):
        before = seen.get(call["agent"], [{"role": "system", "content": f"You are {record.speaker}."}])
        assert call["messages"][: len(before)] == before
        assert len(call["messages"]) == len(before) + 1
        seen[call["agent"]] = [*call["messages"], {"role": "assistant", "content": record.text}]


@given(turns_strategy)
def test_a_message_holds_exactly_the_visible_words_since_the_agents_last_turn(turns: list[Turn]) -> None:
    records = run_all(script_of(turns), FakeChat())
    for index, turn in enumerate(turns):
        own = [earlier for earlier in range(index) if turns[earlier].speaker == turn.speaker]
        since = range(own[-1] + 1 if own else 0, index)
        heard = [
            f"{turns[i].speaker.capitalize()} said: {records[i].text}" for i in since if turns[i].speaker in turn.sees
        ]
        assert records[index].message == "\n\n".join([*heard, turn.prompt])


@given(turns_strategy, st.data())
def test_resuming_anywhere_sends_what_an_uninterrupted_run_sends(turns: list[Turn], data: st.DataObject) -> None:
    script, whole = script_of(turns), FakeChat()
    records = run_all(script, whole, seed=7)
    cut = data.draw(st.integers(0, len(turns)))
    rest = FakeChat()
    run = WorkflowRun(script, rest, Settings("s", seed=7), records[:cut])
    assert [run.take(step) for step in run.pending()] == records[cut:]
    assert rest.calls == whole.calls[cut:]


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
    assert [call["max_tokens"] for call in chat.calls] == [2, 3, 4]
    chat = FakeChat()
    run_all(script, chat, max_tokens=1)
    assert [call["max_tokens"] for call in chat.calls] == [1, 1, 1]


def test_seeds_count_up_by_turn_and_are_absent_without_one() -> None:
    chat = FakeChat()
    run_all(TALK, chat, seed=40)
    assert [call["seed"] for call in chat.calls] == [40, 41, 42, 43, 44]
    chat = FakeChat()
    run_all(TALK, chat)
    assert {call["seed"] for call in chat.calls} == {None}


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


def test_transcripts_survive_the_disk(tmp_path: Path) -> None:
    run = WorkflowRun(TALK, FakeChat(), Settings("s", seed=3))
    transcript = run.transcript([run.take(step) for step in run.pending()])
    path = write_transcript(transcript, tmp_path / "out")
    assert read_transcript(path) == transcript
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["transcript.json", "transcript.md"]


def test_transcript_schema() -> None:
    run = WorkflowRun(TALK, FakeChat(), Settings("s", seed=3))
    data = run.transcript([run.take(run.pending()[0])]).to_json()
    assert {key: data[key] for key in ("format", "workflow", "session", "seed")} == {
        "format": 1,
        "workflow": "talk",
        "session": "s",
        "seed": 3,
    }
    turn = data["turns"][0]
    assert (turn["match"], turn["cache_state"], turn["prompt_tokens"]) == ("EXTEND", "hot", 30)
    assert (turn["cached_tokens"], turn["computed_tokens"], turn["completion_tokens"]) == (25, 5, 2)
    assert (turn["ttft_ms"], turn["server_ttft_ms"], turn["total_ms"], turn["written_bytes"]) == (3.0, 2.0, 4.0, 99)
    json.dumps(data)


def test_markdown_reads_as_a_conversation() -> None:
    run = WorkflowRun(TALK, FakeChat(), Settings("s"))
    records = [run.take(step) for step in run.pending()]
    text = run.transcript(records).to_markdown()
    assert text.startswith("# A talk\n")
    assert "## 1. phase 0" in text
    assert f"**Ann:** {records[0].text}" in text
    assert "> Greet." in text


@pytest.mark.parametrize("data", [[], {}, {"format": 2}, {"format": 1}, {"format": 1, "turns": [{"token_ids": []}]}])
def test_what_is_no_transcript_is_refused(data: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        from_json(data)
    path = tmp_path / "transcript.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="transcript.json"):
        read_transcript(path)


def test_llm_chat_passes_messages_and_sampling_on() -> None:
    report = Report(
        "s.ann", CacheState.WARM, Match.EXTEND, 30, 2, CachedTokens(20, 5), 5, 1.5, 0.5, 10, written_bytes=7
    )
    asked: list[Any] = []

    def chat(messages: list[Message], sampling: SamplingParams, *, agent: str) -> Any:
        asked.append((messages, sampling, agent))
        return SimpleNamespace(text="hello", token_ids=[4, 5], report=report)

    run = WorkflowRun(TALK, LLMChat(SimpleNamespace(chat=chat)), Settings("s", seed=1, max_tokens=9))
    record = run.take(run.pending()[0])
    messages, sampling, agent = asked[0]
    assert (agent, messages[-1]["content"]) == ("s.ann", "Greet.")
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0.0, 1)
    assert (record.cache_state, record.match, record.cached_tokens, record.written_bytes) == ("warm", "EXTEND", 25, 7)
    assert (record.token_ids, record.ttft_ms) == ((4, 5), 1.5)


def test_alice_and_bob_cannot_overhear_what_the_other_told_the_warden() -> None:
    script = read_script("prisoners_dilemma")
    records = run_all(script, FakeChat())
    by_place = {(record.phase, record.turn): record for record in records}
    assert "said:" not in by_place[2, 1].message
    secret = f"Bob said: {by_place[1, 3].text}"
    assert not any(secret in record.message for record in records if record.speaker == "alice")
    assert "Alice said:" in by_place[2, 2].message
    assert len(records) == len(steps_of(script))
