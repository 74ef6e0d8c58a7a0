from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentcache.adapters.activation import AdapterUse
from agentcache.api.request import ChatPrompt, Request
from agentcache.blocks.prefix_match import PromptMatch
from agentcache.blocks.transcript import TranscriptContent
from agentcache.store.manifest import AgentRecord
from agentcache.text.replies.stop_strings import NO_STOPS, StopStrings

if TYPE_CHECKING:
    from agentcache.text.grammars.compiler import Grammar


@dataclass(frozen=True, eq=False)
class SubmittedRequest:
    """A tokenized request. Never changes.

    Args:
        found: matched lineage; None for a new one.
        held: content of `found.transcript`, kept in RAM until the request ends.
        goes_on: the turn replaces `found`, which it extends or equals (`is_twin`).
        system_tokens: length of the system prompt and tools, if known.
        repeated_tokens: for recurrent models, prompt tokens that the next prompt repeats if it does not repeat the
            reply; else 0.
    """

    request: Request
    match: PromptMatch
    max_tokens: int
    submitted_at: float = field(default_factory=time.perf_counter)
    found: AgentRecord | None = None
    held: TranscriptContent | None = None
    goes_on: bool = False
    adapter: AdapterUse | None = None
    system_tokens: int = 0
    repeated_tokens: int = 0
    grammar: Grammar | None = None
    stops: StopStrings = NO_STOPS

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.match.transcript.ids)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request.prompt, ChatPrompt)
