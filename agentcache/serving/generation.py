"""One request being worked on: everything that changes about it, in one object."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentcache.blocks.prefix_cache import Sequence
from agentcache.blocks.prefix_match import PromptMatch
from agentcache.kv.manifest import AgentRecord
from agentcache.serving.output import Output
from agentcache.serving.request import CachedTokens, FinishReason, Request, TokenLogprob, Update

Emit = Callable[[Update | BaseException], None]


@dataclass(eq=False)
class Generation:
    """A request from admission to its last update.

    `num_computed` against `len(token_ids)` is the whole state of progress: prompt and generated tokens alike are known
    first and computed later, in pieces of any size. Sequence and counters survive neither preemption nor a failed
    restore; the tokens do.

    Attributes:
        match: the prompt as tokens, and how it relates to the agent's transcript.
        emit: gets every update; called on the engine thread.
        token_ids: prompt, then what was generated.
        sequence: its place in the cache; None while waiting.
        record: the request's agent before this turn.
        own_tokens: leading prompt tokens that are the agent's already.
    """

    request: Request
    match: PromptMatch
    max_tokens: int
    output: Output
    emit: Emit
    token_ids: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    cancelled: bool = False
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: CachedTokens = field(default_factory=CachedTokens)
    computed_prompt_tokens: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    submitted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    own_tokens: int = 0
    written_bytes: int = 0
    record: AgentRecord | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.match.transcript.ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_computed(self) -> int:
        return 0 if self.sequence is None else self.sequence.num_tokens

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens
