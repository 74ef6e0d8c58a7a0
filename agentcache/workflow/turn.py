"""One turn: ask, run the calls of the answer, and ask again until an answer has no calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentcache.workflow.chat import Chat, Message, Question, Reply, Restored
from agentcache.workflow.checks import check_turn
from agentcache.workflow.conversation import Exchange, message
from agentcache.workflow.script import Step
from agentcache.workflow.tools import LookupTable, ToolCall, find_calls, run_call
from agentcache.workflow.transcript import ToolRound, TurnRecord


@dataclass(frozen=True)
class OpenTurn:
    step: Step
    question: Question
    tables: tuple[LookupTable, ...]

    @property
    def message(self) -> Message:
        return self.question.messages[-1]


@dataclass(frozen=True)
class SpokenTurn:
    """The answers of a turn: one for each round of calls, then the final one."""

    replies: tuple[Reply, ...]
    rounds: tuple[ToolRound, ...]

    @property
    def text(self) -> str:
        return self.replies[-1].text


def speak(chat: Chat, turn: OpenTurn) -> SpokenTurn:
    """Take the turn. Changes only the engine's cache, so that it can be retried."""
    question = turn.question
    replies: list[Reply] = []
    rounds: list[ToolRound] = []
    while True:
        reply = chat.chat(question)
        replies.append(reply)
        calls = find_calls(reply.text) if turn.tables and len(rounds) < turn.step.turn.max_calls else []
        if not calls:
            return SpokenTurn(tuple(replies), tuple(rounds))
        rounds.append(ToolRound(reply.text, tuple(run_call(call, turn.tables) for call in calls)))
        question = replace(question, messages=[*question.messages, *_messages_of(rounds[-1])])


def exchange_of(opening: Message, rounds: Sequence[ToolRound], text: str) -> Exchange:
    """Return a turn's messages. Answers and calls stay unmodified, so that later prompts extend the cached one."""
    between = [each for tool_round in rounds for each in _messages_of(tool_round)]
    return Exchange((opening, *between, message("assistant", text)), text)


def _messages_of(tool_round: ToolRound) -> list[Message]:
    return [message("assistant", tool_round.text), *(message("tool", read) for read in tool_round.observations)]


def record_of(turn: OpenTurn, spoken: SpokenTurn, prefetched: Restored | None = None) -> TurnRecord:
    step, first, reports = turn.step, spoken.replies[0], [reply.report for reply in spoken.replies]
    written = [report["written_bytes"] for report in reports if report.get("written_bytes") is not None]
    saved = [report["saved"] for report in reports if report.get("saved") is not None]
    return TurnRecord(
        phase=step.phase_number,
        turn=step.turn_number,
        phase_name=step.phase.name,
        speaker=step.turn.speaker,
        agent=turn.question.agent,
        message=turn.message["content"],
        text=spoken.text,
        token_ids=tuple(token for reply in spoken.replies for token in reply.token_ids),
        match=str(first.report["match"]),
        cache_state=str(first.report["cache_state"]),
        prompt_tokens=first.report["prompt_tokens"],
        cached_tokens=sum(filter(None, first.report["cached_tokens"].values())),
        computed_tokens=sum(report["computed_tokens"] for report in reports),
        completion_tokens=sum(reply.completion_tokens for reply in spoken.replies),
        ttft_ms=first.ttft_ms,
        server_ttft_ms=first.report["time_to_first_token_ms"],
        total_ms=sum(reply.total_ms for reply in spoken.replies),
        restored_bytes=first.report["restored_bytes"],
        restore_ms=first.report["restore_ms"],
        written_bytes=sum(written) if written else None,
        saved=all(saved) if saved else None,
        tool_rounds=spoken.rounds,
        checks=check_turn(step.turn, spoken.text, _calls_in(spoken.rounds)),
        prefetched=prefetched is not None and prefetched.restored_bytes > 0,
        prefetch_ms=prefetched.restore_ms if prefetched else 0.0,
    )


def _calls_in(rounds: Sequence[ToolRound]) -> list[ToolCall | None]:
    return [call for tool_round in rounds for call in find_calls(tool_round.text)]
