"""A workflow in progress: agents' histories, and turns with tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from agentcache.api.names import RULE, is_name
from agentcache.errors import ConfigError
from agentcache.workflow.chat import Chat, Message, Question, Reply, Restored
from agentcache.workflow.script import Script, Step, Turn, steps_of
from agentcache.workflow.tools import LookupTable, ToolCall, find_calls, run_call
from agentcache.workflow.transcript import ToolRound, TurnRecord, WorkflowTranscript, check_turn


@dataclass(frozen=True)
class Settings:
    """Settings of a run. `session` prefixes agents' ids; `max_tokens` overrides the script's.

    With `forget_phases`, only the system prompt outlasts a phase.
    """

    session: str
    max_tokens: int | None = None
    forget_phases: bool = False


class WorkflowRun:
    """A script in progress: take `pending` steps in order, or all `ready` ones in parallel.

    Other threads may only `speak`. Raises ConfigError if `done` is not the script's beginning or an id invalid.
    """

    def __init__(self, script: Script, chat: Chat, settings: Settings, done: Iterable[TurnRecord] = ()) -> None:
        self.chat = chat
        self._script = script
        self._settings = settings
        self._steps = steps_of(script)
        self._conversation = Conversation(script)
        self._agent_ids = {agent.id: server_agent_id(settings.session, agent.id) for agent in script.agents}
        for index, record in enumerate(done):
            self._replay(index, record)

    def transcript(self, turns: Sequence[TurnRecord] = ()) -> WorkflowTranscript:
        script = self._script
        names = {agent.id: agent.name for agent in script.agents}
        about = (script.name, script.title, self._settings.session, script.seed)
        return WorkflowTranscript(*about, names, script.values, tuple(turns))

    def pending(self, phases: range | None = None) -> list[Step]:
        """Return steps to take, maybe only of some phases. Raises ConfigError if earlier ones are missing."""
        left = [step for step in self._steps if step.index not in self._conversation.done]
        if phases is None:
            return left
        chosen = [step for step in left if step.phase_number in phases]
        if chosen and chosen[0] is not left[0]:
            raise ConfigError(
                f"phases {phases.start}-{phases.stop - 1} cannot begin before {left[0]} is done; "
                "resume from the transcript of a run that has done it"
            )
        return chosen

    def ready(self, steps: Iterable[Step], after: Iterable[Step] = ()) -> list[Step]:
        """Return steps whose predecessors are done or in `after`."""
        done = self._conversation.done.union(step.index for step in after)
        return [step for step in steps if self._conversation.needs(step) <= done]

    def agent_of(self, step: Step) -> str:
        return self._agent_ids[step.turn.speaker]

    def take(self, step: Step) -> TurnRecord:
        """Take a ready step. If the chat raises, it can be retried."""
        turn = self.open(step)
        return self.end_turn(turn, speak(self.chat, turn))

    def open(self, step: Step) -> OpenTurn:
        history = self._conversation.history(step, this_phase_only=self._settings.forget_phases)
        question = Question(
            agent=self.agent_of(step),
            messages=[*history, self._conversation.message_for(step)],
            max_tokens=self._max_tokens(step.turn),
            temperature=self._script.temperature,
            seed=self._script.seed + step.index,
            tools=[table.definition() for table in self._script.tools_of(step.turn.speaker)],
            adapter=self._script.agent(step.turn.speaker).adapter,
        )
        tables = tuple(table for table in self._script.tools if table.name in step.turn.tools)
        return OpenTurn(step, question, tables)

    def end_turn(self, turn: OpenTurn, spoken: SpokenTurn, prefetched: Restored | None = None) -> TurnRecord:
        self._conversation.add(turn.step, exchange_of(turn.message, spoken.rounds, spoken.text))
        return record_of(turn, spoken, prefetched)

    def _max_tokens(self, turn: Turn) -> int:
        agent = self._script.agent(turn.speaker)
        return self._settings.max_tokens or turn.max_tokens or agent.max_tokens or self._script.max_tokens

    def _replay(self, index: int, record: TurnRecord) -> None:
        if index == len(self._steps):
            raise ConfigError("the transcript has more turns than the script")
        step = self._steps[index]
        if (record.phase, record.turn, record.speaker) != (step.phase_number, step.turn_number, step.turn.speaker):
            raise ConfigError(
                f"the transcript has phase {record.phase}, turn {record.turn} ({record.speaker}) "
                f"where the script has {step}: it is of another script"
            )
        if record.message != self._conversation.message_for(step)["content"]:
            raise ConfigError(f"{step}: the transcript's message is not the script's; has the script changed since?")
        self._conversation.add(step, exchange_of(message("user", record.message), record.tool_rounds, record.text))


def server_agent_id(session: str, agent: str) -> str:
    """Return an agent's id on the server. Raises ConfigError if invalid."""
    joined = f"{session}.{agent}"
    if not is_name(joined):
        raise ConfigError(f'"{joined}" is no valid agent id: {RULE} (choose another session)')
    return joined


def parse_phases(text: str, script: Script) -> range:
    """Parse `"3"` or `"1-3"`. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not found:
        raise ConfigError(f'phases must look like "3" or "1-3", not "{text}"')
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last <= len(script.phases):
        raise ConfigError(f'phases "{text}" are not in the script, which has phases 1 to {len(script.phases)}')
    return range(first, last + 1)


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
    """A turn's answers: one for each round of calls, then the last."""

    replies: tuple[Reply, ...]
    rounds: tuple[ToolRound, ...]

    @property
    def text(self) -> str:
        return self.replies[-1].text


def speak(chat: Chat, turn: OpenTurn) -> SpokenTurn:
    """Take the turn. Changes only the engine's cache."""
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
    """Return a turn's messages unmodified: later prompts extend the cached one."""
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


@dataclass(frozen=True)
class Exchange:
    """Messages that a turn adds to its speaker's history, and the answer that other agents hear."""

    messages: tuple[Message, ...]
    text: str


class Conversation:
    """The histories of all agents, which only grow.

    A turn hears messages since its speaker's last turn in script order: independent turns may run in any order.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._steps = steps_of(script)
        self._exchanges: dict[int, Exchange] = {}

    @property
    def done(self) -> frozenset[int]:
        return frozenset(self._exchanges)

    def needs(self, step: Step) -> frozenset[int]:
        """Return steps that must end first: heard ones, the speaker's own, earlier phases."""
        before = (other for other in self._steps[: step.index] if other.phase_number < step.phase_number)
        return frozenset(other.index for other in (*before, *self._own(step), *self._heard(step)))

    def message_for(self, step: Step) -> Message:
        heard = [self._spoken(other) for other in self._heard(step)]
        return message("user", "\n\n".join([*heard, step.turn.prompt]))

    def history(self, step: Step, *, this_phase_only: bool = False) -> list[Message]:
        own = [other for other in self._own(step) if not this_phase_only or other.phase_number == step.phase_number]
        said = [each for other in own for each in self._exchanges[other.index].messages]
        system = self._script.agent(step.turn.speaker).system
        return [*([message("system", system)] if system else []), *said]

    def add(self, step: Step, exchange: Exchange) -> None:
        self._exchanges[step.index] = exchange

    def _own(self, step: Step) -> list[Step]:
        return [other for other in self._steps[: step.index] if other.turn.speaker == step.turn.speaker]

    def _heard(self, step: Step) -> Sequence[Step]:
        own = self._own(step)
        since = self._steps[own[-1].index + 1 if own else 0 : step.index]
        return [other for other in since if other.turn.speaker in step.turn.sees]

    def _spoken(self, step: Step) -> str:
        name = self._script.agent(step.turn.speaker).name
        words = self._exchanges[step.index].text.strip()
        return f"{name} said: {words}" if words else f"{name} said nothing."


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
