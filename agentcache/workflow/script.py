"""Data classes of workflow scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentcache.workflow.tools import LookupTable, ToolCall

DEFAULT_MAX_TOKENS = 64
DEFAULT_MAX_CALLS = 2
DEFAULT_SEED = 1


@dataclass(frozen=True)
class Agent:
    """One speaker; `name` precedes its statements."""

    id: str
    name: str
    system: str | None = None
    max_tokens: int | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Turn:
    """One agent's turn, which hears what `sees` said since the speaker's last turn.

    Each `expect` and `expect_calls` is a point; a word of `reject` costs all points of `expect`.
    """

    speaker: str
    prompt: str
    sees: tuple[str, ...] = ()
    max_tokens: int | None = None
    expect: tuple[str, ...] = ()
    reject: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    max_calls: int = DEFAULT_MAX_CALLS
    expect_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Phase:
    name: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Script:
    """A whole workflow; `seed` determines its `values`, and seeds sampled turns."""

    name: str
    title: str
    agents: tuple[Agent, ...]
    phases: tuple[Phase, ...]
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    tools: tuple[LookupTable, ...] = ()
    seed: int = DEFAULT_SEED
    values: Mapping[str, str] = field(default_factory=dict)

    def agent(self, agent_id: str) -> Agent:
        for agent in self.agents:
            if agent.id == agent_id:
                return agent
        raise KeyError(agent_id)

    def tools_of(self, agent_id: str) -> tuple[LookupTable, ...]:
        """Return the tools of all the agent's turns: the prompt's beginning never changes."""
        turns = [turn for phase in self.phases for turn in phase.turns if turn.speaker == agent_id]
        return tuple(tool for tool in self.tools if any(tool.name in turn.tools for turn in turns))


@dataclass(frozen=True)
class Step:
    """A turn; `index` counts from 0, the numbers from 1."""

    index: int
    phase_number: int
    turn_number: int
    phase: Phase
    turn: Turn

    def __str__(self) -> str:
        return f'phase {self.phase_number} ("{self.phase.name}"), turn {self.turn_number} ({self.turn.speaker})'


def steps_of(script: Script) -> list[Step]:
    positions = [
        (phase_number, turn_number, phase, turn)
        for phase_number, phase in enumerate(script.phases, 1)
        for turn_number, turn in enumerate(phase.turns, 1)
    ]
    return [Step(index, *position) for index, position in enumerate(positions)]
