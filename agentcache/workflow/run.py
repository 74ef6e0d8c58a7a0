from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentcache.api.names import RULE, is_name
from agentcache.errors import ConfigError
from agentcache.workflow.chat import Chat, Question, Restored
from agentcache.workflow.conversation import Conversation, message
from agentcache.workflow.script import Script, Step, Turn, steps_of
from agentcache.workflow.transcript import TurnRecord, WorkflowTranscript
from agentcache.workflow.turn import OpenTurn, SpokenTurn, exchange_of, record_of, speak


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Args:
        session: prefix of the agents' ids on the server; the same session finds the same agents again.
        max_tokens: override of every max_tokens of the script.
        forget_phases: whether agents lose their history, except the system prompt, at each phase (a baseline).
    """

    session: str
    max_tokens: int | None = None
    forget_phases: bool = False


class WorkflowRun:
    """A script in progress. Take `pending` steps in order, or all `ready` ones in parallel (`schedule.take_all`).

    Not thread-safe; only `speak` may run on other threads. Raises ConfigError: `done` is not the beginning of this
    script, or the session makes invalid agent ids.
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
        """Return the steps still to take, optionally of some phases.

        Raises ConfigError: steps of an earlier phase are missing, without which histories are incomplete.
        """
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
        """Return the steps whose predecessors are done, assuming that the steps `after` end."""
        done = self._conversation.done.union(step.index for step in after)
        return [step for step in steps if self._conversation.needs(step) <= done]

    def agent_of(self, step: Step) -> str:
        return self._agent_ids[step.turn.speaker]

    def take(self, step: Step) -> TurnRecord:
        """Take a ready step. If the chat raises, nothing changes, and the step can be retried."""
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
        """Record a finished turn; later steps can hear it."""
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
    """Return the id on the server. Raises ConfigError if session and id form an invalid one."""
    joined = f"{session}.{agent}"
    if not is_name(joined):
        raise ConfigError(f'"{joined}" is no valid agent id: {RULE} (choose another session)')
    return joined


def parse_phases(text: str, script: Script) -> range:
    """Parse `"3"` or `"1-3"` into phase numbers, from 1. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not found:
        raise ConfigError(f'phases must look like "3" or "1-3", not "{text}"')
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last <= len(script.phases):
        raise ConfigError(f'phases "{text}" are not in the script, which has phases 1 to {len(script.phases)}')
    return range(first, last + 1)
