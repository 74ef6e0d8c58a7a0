"""Phases over agents: run a script, turn by turn, against whatever can chat.

Each agent has a message history of its own, which only ever grows at the end; so every turn's prompt extends what the
agent has cached. What the others said since an agent's last turn reaches it inside its next user message, as far as the
turn lets it see them. A statement it was not allowed to see then is never shown to it later.

The engine stands behind `Chat`: `agentcache.client.HttpChat` for a server, `LLMChat` for an engine in this process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from agentcache.errors import ConfigError
from agentcache.serving.request import SamplingParams
from agentcache.workflow.script import Agent, Script, Step, Turn, steps_of
from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript

Message = dict[str, str]


@dataclass(frozen=True)
class Reply:
    """What an engine answered.

    Args:
        text, token_ids: the answer.
        report: the `agentcache` object of the answer (see `serving.request.Report`), as plain data.
        completion_tokens: tokens in the answer.
        ttft_ms: time to the first token, measured by the caller.
        total_ms: time to the end of the answer, its saving included.
    """

    text: str
    token_ids: tuple[int, ...]
    report: Mapping[str, Any]
    completion_tokens: int
    ttft_ms: float
    total_ms: float


class Chat(Protocol):
    """An engine as a workflow needs it."""

    def chat(
        self, agent: str, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Reply:
        """The agent's answer to `messages`, which are its whole history; returns when the turn is safe on disk."""
        ...


class LLMChat:
    """`Chat` over an `agentcache.llm.LLM` in this process; the caller opens and closes it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def chat(
        self, agent: str, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Reply:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        started = time.perf_counter()
        output = self._llm.chat(list(messages), sampling, agent=agent)
        total_ms = (time.perf_counter() - started) * 1000
        report = asdict(output.report)
        ids = tuple(output.token_ids)
        return Reply(output.text, ids, report, len(ids), report["time_to_first_token_ms"], total_ms)


@dataclass(frozen=True)
class Statement:
    speaker: str
    text: str


class Conversation:
    """Who has said and heard what. Owns the agents' histories, which only ever grow at the end."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._statements: list[Statement] = []
        self._heard = {agent.id: 0 for agent in script.agents}  # statements made before the agent's last turn ended
        self._histories = {agent.id: _opening(agent) for agent in script.agents}

    def history(self, speaker: str) -> list[Message]:
        """A copy of the agent's messages so far."""
        return list(self._histories[speaker])

    def message_for(self, turn: Turn) -> str:
        """The user message that opens this turn: what the speaker heard since its last turn, then its prompt."""
        new = self._statements[self._heard[turn.speaker] :]
        heard = [self._spoken(statement) for statement in new if statement.speaker in turn.sees]
        return "\n\n".join([*heard, turn.prompt])

    def add(self, turn: Turn, message: str, text: str) -> None:
        """The turn is over: `message` was asked and `text` was said."""
        self._histories[turn.speaker] += [_message("user", message), _message("assistant", text)]
        self._statements.append(Statement(turn.speaker, text))
        self._heard[turn.speaker] = len(self._statements)

    def _spoken(self, statement: Statement) -> str:
        name = self._script.agent(statement.speaker).name
        words = statement.text.strip()
        return f"{name} said: {words}" if words else f"{name} said nothing."


def _opening(agent: Agent) -> list[Message]:
    return [_message("system", agent.system)] if agent.system else []


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


@dataclass(frozen=True)
class Settings:
    """How to run a script.

    Args:
        session: prefix of the agents' ids on the server; the same session finds the same agents again.
        seed: turn n of the script samples with seed + n - 1; None samples freely. Greedy turns do not need it.
        max_tokens: overrides every max_tokens of the script.
    """

    session: str
    seed: int | None = None
    max_tokens: int | None = None


class WorkflowRun:
    """A script being run. Take the steps that are `pending`, one after the other.

    Raises:
        ConfigError: the finished turns are not the beginning of this script, or the session makes invalid agent ids.
    """

    def __init__(self, script: Script, chat: Chat, settings: Settings, done: Iterable[TurnRecord] = ()) -> None:
        self._script = script
        self._chat = chat
        self._settings = settings
        self._steps = steps_of(script)
        self._conversation = Conversation(script)
        self._num_done = 0
        self._agent_ids = {agent.id: server_agent_id(settings.session, agent.id) for agent in script.agents}
        for record in done:
            self._replay(record)

    def transcript(self, turns: Sequence[TurnRecord] = ()) -> WorkflowTranscript:
        """This run's transcript with those turns in it."""
        script, settings = self._script, self._settings
        names = {agent.id: agent.name for agent in script.agents}
        return WorkflowTranscript(script.name, script.title, settings.session, settings.seed, names, tuple(turns))

    def pending(self, phases: range | None = None) -> list[Step]:
        """The steps still to take, in those phases only.

        Raises:
            ConfigError: turns of an earlier phase are still to be taken; histories cannot be built without them.
        """
        left = self._steps[self._num_done :]
        if phases is None:
            return left
        chosen = [step for step in left if step.phase_number in phases]
        if chosen and chosen[0] is not left[0]:
            raise ConfigError(
                f"phases {phases.start}-{phases.stop - 1} cannot begin before {left[0]} is done; "
                "resume from the transcript of a run that has done it"
            )
        return chosen

    def take(self, step: Step) -> TurnRecord:
        """Take the next step. Nothing changes when the chat raises, so that it can be tried again."""
        turn = step.turn
        message = self._conversation.message_for(turn)
        reply = self._chat.chat(
            self._agent_ids[turn.speaker],
            [*self._conversation.history(turn.speaker), _message("user", message)],
            max_tokens=self._max_tokens(turn),
            temperature=self._script.temperature,
            seed=None if self._settings.seed is None else self._settings.seed + self._num_done,
        )
        self._finish(turn, message, reply.text)
        return _record(step, self._agent_ids[turn.speaker], message, reply)

    def _max_tokens(self, turn: Turn) -> int:
        agent = self._script.agent(turn.speaker)
        return self._settings.max_tokens or turn.max_tokens or agent.max_tokens or self._script.max_tokens

    def _finish(self, turn: Turn, message: str, text: str) -> None:
        self._conversation.add(turn, message, text)
        self._num_done += 1

    def _replay(self, record: TurnRecord) -> None:
        if self._num_done == len(self._steps):
            raise ConfigError("the transcript has more turns than the script")
        step = self._steps[self._num_done]
        if (record.phase, record.turn, record.speaker) != (step.phase_number, step.turn_number, step.turn.speaker):
            raise ConfigError(
                f"the transcript has phase {record.phase}, turn {record.turn} ({record.speaker}) "
                f"where the script has {step}: it is of another script"
            )
        message = self._conversation.message_for(step.turn)
        if record.message != message:
            raise ConfigError(f"{step}: the transcript's message is not the script's; has the script changed since?")
        self._finish(step.turn, message, record.text)


def _record(step: Step, agent: str, message: str, reply: Reply) -> TurnRecord:
    report = reply.report
    return TurnRecord(
        phase=step.phase_number,
        turn=step.turn_number,
        phase_name=step.phase.name,
        speaker=step.turn.speaker,
        agent=agent,
        message=message,
        text=reply.text,
        token_ids=reply.token_ids,
        match=str(report["match"]),
        cache_state=str(report["cache_state"]),
        prompt_tokens=report["prompt_tokens"],
        cached_tokens=sum(report["cached_tokens"].values()),
        computed_tokens=report["computed_tokens"],
        completion_tokens=reply.completion_tokens,
        ttft_ms=reply.ttft_ms,
        server_ttft_ms=report["time_to_first_token_ms"],
        total_ms=reply.total_ms,
        restored_bytes=report["restored_bytes"],
        restore_ms=report["restore_ms"],
        written_bytes=report.get("written_bytes"),
        saved=report.get("saved"),
    )


def server_agent_id(session: str, agent: str) -> str:
    """The agent's id on the server.

    Raises:
        ConfigError: session and id together are no valid id there.
    """
    joined = f"{session}.{agent}"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", joined):
        raise ConfigError(f'"{joined}" is no valid agent id: 1 to 64 of A-Z a-z 0-9 . _ - (choose another session)')
    return joined


def parse_phases(text: str, script: Script) -> range:
    """`"3"` or `"1-3"` as phase numbers, counted from 1.

    Raises:
        ConfigError: not of that form, or not phases of the script.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not found:
        raise ConfigError(f'phases must look like "3" or "1-3", not "{text}"')
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last <= len(script.phases):
        raise ConfigError(f'phases "{text}" are not in the script, which has phases 1 to {len(script.phases)}')
    return range(first, last + 1)
