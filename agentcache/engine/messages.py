"""Messages to the engine. Any reply may be an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentcache.adapters.activation import AdapterUse
from agentcache.blocks.prefix_match import PromptMatch
from agentcache.blocks.transcript import TranscriptContent
from agentcache.models.adapters import AdapterContent
from agentcache.models.decoder import Decoder
from agentcache.request import Request
from agentcache.store.archived_agent import ArchivedAgent
from agentcache.store.manifest import AgentRecord
from agentcache.store.response_files import ResponseFiles
from agentcache.system.pressure import Level
from agentcache.text.grammars.compiler import Grammar
from agentcache.text.stop_strings import NO_STOPS, StopStrings

Reply = Callable[[Any], None]


@dataclass(frozen=True, eq=False)
class Submit:
    """A tokenized request. Replies: updates, the last one with a report.

    Args:
        match: prompt tokens, and their relation to `found`.
        found: matched lineage; None for a new one.
        held: transcript content of `found`, kept in RAM until the request ends.
        goes_on: whether the turn replaces `found`, which it extends or equals (`is_twin`).
        submitted_at: time by `time.perf_counter`.
        system_tokens: tokens of the system prompt and tools, as far as known.
        repeated_tokens: prompt tokens that the next prompt repeats, if it does not repeat the reply; else 0. For models
            with recurrent layers.
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
    """Cancel a request, which gets its own error. Reply: None."""

    submitted: Submit


@dataclass(frozen=True)
class MeasurePrecision:
    """Compute one forward pass of the precision search. Reply: `Measuring`."""


@dataclass(frozen=True)
class UseResponses:
    """Run `work` on the writer thread. Reply: its result."""

    work: Callable[[ResponseFiles], Any]


@dataclass(frozen=True)
class ListAgents:
    """Reply: `list[AgentInfo]`."""


@dataclass(frozen=True)
class ShowAgent:
    """Reply: `AgentInfo`."""

    agent_id: str


@dataclass(frozen=True)
class LookAgain:
    """Check whether an unavailable agent is readable. Reply: None."""

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
    """Evict RAM of all caches or of one `kind` (`keys.kind_of`). Reply: None."""

    agent_id: str
    lineage: str | None
    kind: str | None = None


@dataclass(frozen=True)
class PutAdapter:
    """Load an adapter, or a decoder's next piece. Reply: whether it is complete."""

    content: AdapterContent | Decoder


@dataclass(frozen=True)
class DropAdapter:
    """Drop unused weights. Reply: None."""

    digest: str


@dataclass(frozen=True)
class RelieveMemory:
    """Report memory pressure, on change and while it lasts. Reply: None."""

    level: Level


@dataclass(frozen=True)
class ReadStats:
    """Reply: `CacheStats`."""


@dataclass(frozen=True)
class ClearCache:
    """Reply: None."""


@dataclass(frozen=True)
class CheckIntegrity:
    """Reply: None if every block is accounted for."""


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
