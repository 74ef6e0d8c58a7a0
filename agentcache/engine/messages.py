"""What other threads ask of the engine: values. An error may be the reply to each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentcache.adapters.activation import AdapterUse
from agentcache.blocks.prefix_match import PromptMatch
from agentcache.blocks.transcript import TranscriptContent
from agentcache.models.adapters import AdapterContent
from agentcache.models.decoder import Decoder
from agentcache.models.text.grammars.compiler import Grammar
from agentcache.models.text.stop_strings import NO_STOPS, StopStrings
from agentcache.pressure import Level
from agentcache.request import Request
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.manifest import AgentRecord
from agentcache.store.response_files import ResponseFiles

Reply = Callable[[Any], None]


@dataclass(frozen=True, eq=False)
class Submit:
    """A request whose prompt is known. Replies: its updates, the last of which has a report.

    Args:
        match: the prompt as tokens, and how it relates to the lineage that was found.
        max_tokens: to generate, at most.
        found: the agent's lineage that the prompt was matched with; None for another beginning.
        held: content of the transcript of `found`, which stays in RAM until the request ends; None without one.
        goes_on: whether the turn takes the place of `found`: the prompt extends it, or is its twin (`is_twin`).
        adapter: None for base.
        submitted_at: by `time.perf_counter`.
        system_tokens: how many of the prompt are its system prompt and tools, as far as that is known.
        repeated_tokens: how many of the prompt the conversation's next prompt repeats, where that does not repeat the
            reply; else 0. For models with recurrent layers.
        grammar: of all that is generated; None for any.
        stops: the automaton of the request's stop strings.
    """

    request: Request
    match: PromptMatch
    max_tokens: int
    submitted_at: float
    found: AgentRecord | None = None
    held: TranscriptContent | None = None
    goes_on: bool = False
    adapter: AdapterUse | None = None
    system_tokens: int = 0
    repeated_tokens: int = 0
    grammar: Grammar | None = None
    stops: StopStrings = NO_STOPS


@dataclass(frozen=True)
class Cancel:
    """Cancel what was submitted: its client has left. Reply: None; what was submitted has its own end."""

    submitted: Submit


@dataclass(frozen=True)
class MeasurePrecision:
    """Compute one forward pass of the search for a precision. Reply: `Measuring`."""


@dataclass(frozen=True)
class UseResponses:
    """Stored responses are to be read or changed, on the writer's thread. Reply: what `work` returns."""

    work: Callable[[ResponseFiles], Any]


@dataclass(frozen=True)
class ListAgents:
    """Reply: all, as `list[AgentInfo]`."""


@dataclass(frozen=True)
class ShowAgent:
    """Reply: `AgentInfo`."""

    agent_id: str


@dataclass(frozen=True)
class LookAgain:
    """See whether an unavailable agent can be read by now. Reply: None, once that is known."""

    agent_id: str


@dataclass(frozen=True)
class CreateAgent:
    """Reply: `Saved`."""

    agent_id: str
    adapter: str | None
    policy: str
    system: str | None


@dataclass(frozen=True)
class ImportAgent:
    """Reply: `Saved`."""

    archive: ArchivedAgent


@dataclass(frozen=True)
class ForkAgent:
    """Reply: `Saved`."""

    agent_id: str
    new_id: str
    lineage: str | None
    adapter: str | None = None
    policy: str | None = None


@dataclass(frozen=True)
class DeleteAgent:
    """Reply: `Saved`."""

    agent_id: str
    lineage: str | None


@dataclass(frozen=True)
class SaveAgent:
    """Reply: `Saved`."""

    agent_id: str
    lineage: str | None


@dataclass(frozen=True)
class RestoreAgent:
    """Reply: `RestoreReport`."""

    agent_id: str
    lineage: str | None


@dataclass(frozen=True)
class EvictAgent:
    """Only from caches of that kind, where it is given (`keys.kind_of`). Reply: None."""

    agent_id: str
    lineage: str | None
    kind: str | None = None


@dataclass(frozen=True)
class PutAdapter:
    """An adapter, or a decoder's next piece. Reply: whether all of it is on the device."""

    content: AdapterContent | Decoder


@dataclass(frozen=True)
class DropAdapter:
    """Drop an unused adapter's weights. Reply: None."""

    digest: str


@dataclass(frozen=True)
class RelieveMemory:
    """How short of memory the system is: with every change, and again while it lasts. Reply: None."""

    level: Level


@dataclass(frozen=True)
class ReadStats:
    """Reply: `CacheStats`."""


@dataclass(frozen=True)
class ClearCache:
    """Reply: None."""


@dataclass(frozen=True)
class CheckIntegrity:
    """Reply: None, if every block of cache and trunk is accounted for."""


Message = (
    Submit
    | Cancel
    | UseResponses
    | ListAgents
    | LookAgain
    | ShowAgent
    | CreateAgent
    | ImportAgent
    | ForkAgent
    | DeleteAgent
    | SaveAgent
    | RestoreAgent
    | EvictAgent
    | PutAdapter
    | DropAdapter
    | RelieveMemory
    | MeasurePrecision
    | ReadStats
    | ClearCache
    | CheckIntegrity
)
