from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from agentcache.adapters.activation import AdapterUse
from agentcache.agents.disk import Saved
from agentcache.api.policy import Policy
from agentcache.api.report import CachedTokens, CacheState, FinishReason, Report, StepDown, TokenLogprob, Update
from agentcache.api.request import ChatPrompt, Request
from agentcache.blocks.block_tables import BlockTables, PathBlock
from agentcache.blocks.keys import KVOrigin
from agentcache.blocks.prefix_match import PromptMatch
from agentcache.blocks.snapshots import SnapshotPlan
from agentcache.engine.output import Output
from agentcache.engine.passes import Pass, ResidualKV
from agentcache.engine.plans import RequestPlan
from agentcache.errors import AgentCacheError, BrokenInvariant
from agentcache.store.manifest import AgentRecord

if TYPE_CHECKING:
    from agentcache.engine.messages import Submit
    from agentcache.models.sampler import Sampler
    from agentcache.models.step import RowState
    from agentcache.text.grammars.compiler import GrammarMatcher

Emit = Callable[[Update | BaseException], None]


class State(Enum):
    """The states in order; a request that loses its block tables returns to WAITING.

    Only `Requests.move` changes a state. All but DONE can end in FAILED.
    """

    NEW = "new"
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SAVING = "saving"
    DONE = "done"
    FAILED = "failed"


# A finish reason keeps what was computed; an error leaves no trace.
Outcome = FinishReason | AgentCacheError

LIVE = frozenset({State.WAITING, State.LOADING, State.RUNNING})


@dataclass(eq=False)
class RunningRequest:
    """One running request.

    Tokens are known first and computed later, in pieces of any size: progress is `num_computed` of `len(token_ids)`.
    Preemption and failed restores lose block tables and counters, but no tokens. `num_launched` includes tokens on the
    device; only the next launch may rely on it.

    Attributes:
        emit: callback for updates, on the engine thread; the last one has a report or is an error.
        token_ids: prompt, then generated tokens.
        plan: block tables and passes; None while waiting.
        stepped_down: reason for the fallback from `residual`.
        divergence: relative error of base's KV against the adapter's own; None if not measured.
        saved_early: blocks sent to disk before the turn's end, by cache.
        in_flight: tokens on the device.
        background: whether other requests go first.
        passed_over: number of times that another request went first.
        decoded_at: number of its last decode step.
        found: lineage that the prompt was matched with.
        goes_on, repeated_tokens: as in `Submit`.
        record: lineage of this turn, before the turn.
        producer: KV origin; None for base.
        computed_base_tokens: prompt tokens that base computes.
        own_tokens: prompt tokens that `found` contains.
        expected_tokens: those of them with KV after the last turn.
        lost_tokens: those of them neither in RAM nor on disk.
        system_tokens: prompt tokens that other conversations may share.
        row_state, launched_state: recurrent state after `num_computed`, `num_launched` tokens.
        shown_state: last recurrent state whose text is sent and thus final, with its token count.
        shown_tokens: number of tokens whose text is sent.
        following: grammar matcher.
        is_late: whether the next token awaits its grammar mask.
        leader: source request, which computes its next block (`PrefixSharing`).
    """

    request: Request
    match: PromptMatch
    max_tokens: int
    output: Output
    emit: Emit
    submitted: Submit | None = None
    state: State = State.NEW
    sampler: Sampler | None = None
    token_ids: list[int] = field(default_factory=list)
    plan: RequestPlan | None = None
    stepped_down: StepDown | None = None
    divergence: float | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: CachedTokens = field(default_factory=CachedTokens)
    computed_prompt_tokens: int = 0
    computed_base_tokens: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    submitted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    own_tokens: int = 0
    expected_tokens: int = 0
    lost_tokens: int = 0
    written_bytes: int = 0
    saved_early: dict[str, list[PathBlock]] = field(default_factory=dict)
    found: AgentRecord | None = None
    goes_on: bool = False
    record: AgentRecord | None = None
    producer: KVOrigin | None = None
    adapter: AdapterUse | None = None
    in_flight: int = 0
    passed_over: int = 0
    decoded_at: int = 0
    system_tokens: int = 0
    repeated_tokens: int = 0
    snapshots: SnapshotPlan | None = None
    row_state: RowState | None = None
    launched_state: RowState | None = None
    shown_state: tuple[int, RowState] | None = None
    shown_tokens: int = 0
    following: GrammarMatcher | None = None
    is_late: bool = False
    leader: RunningRequest | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.match.transcript.ids)
        self.num_prompt_tokens = self.shown_tokens = len(self.token_ids)
        self.background = self.request.is_background

    @property
    def open_plan(self) -> RequestPlan:
        if self.plan is None:
            raise BrokenInvariant(f"request {self.request.request_id} has no sequence in the cache")
        return self.plan

    @property
    def open_sequence(self) -> BlockTables:
        return self.open_plan.sequence

    @property
    def current(self) -> Pass:
        return self.open_plan.passes[0]

    @property
    def residual_kv(self) -> ResidualKV | None:
        return None if self.plan is None else self.plan.residual_kv

    @property
    def last_for_adapter(self) -> int:
        """First token whose logits the adapter must compute."""
        return 0 if self.wants_prompt_logprobs else len(self.token_ids) - 1

    @property
    def num_computed(self) -> int:
        return 0 if self.plan is None else self.plan.passes[0].writes.num_tokens

    @property
    def num_launched(self) -> int:
        return self.num_computed + self.in_flight

    @property
    def num_to_launch(self) -> int:
        return len(self.token_ids) - self.num_computed - self.in_flight

    @property
    def num_to_prefill(self) -> int:
        """Known tokens that the current pass must launch."""
        end = self.current.end
        return self.num_to_launch if end is None else min(self.num_to_launch, end - self.num_launched)

    @property
    def can_prefill(self) -> bool:
        """Whether a chunk can start: one at a time, to bound its window slots."""
        led = self.leader is not None and self.leader.in_flight
        return not self.in_flight and not led and self.num_to_launch > 1

    @property
    def can_decode(self) -> bool:
        """Whether it can join the next decode step, perhaps with the token being chosen.

        The first token is awaited, to be sent at once; the last one too, as none follows.
        """
        if not self.in_flight:
            return self.num_to_launch == 1
        if self.is_late or self.num_to_launch or not 0 < self.num_generated < self.max_tokens - 1:
            return False
        return self.current.end is None  # such a pass chooses no token

    @property
    def will_decode(self) -> bool:
        return bool(self.in_flight) and self.num_to_launch == 0 and self.num_generated < self.max_tokens - 1

    def note_caught_up(self, begin: int, end: int) -> None:
        """Count prompt tokens that another request has computed."""
        if self.num_generated:
            return
        num_tokens, cached = end - begin, self.cached
        if self.residual_kv is None:
            start = self.num_prompt_tokens if self.producer is None else self.producer.start
            self.computed_base_tokens -= max(0, min(end, start) - begin)
        elif self.current.computes is None:
            self.computed_base_tokens -= num_tokens
        if self.residual_kv is None or self.current.residual_kv is not None:
            residual = None if cached.residual is None else cached.residual + num_tokens
            self.cached = CachedTokens(cached.own, cached.shared + num_tokens, residual)
            if self.residual_kv is None or self.current.computes is not None:
                self.computed_prompt_tokens -= num_tokens

    def begin_state(self, state: RowState) -> None:
        self.row_state = self.launched_state = state

    def apply_state(self, state: RowState) -> None:
        self.row_state = state
        if self.num_computed <= self.shown_tokens:
            self.shown_state = self.num_computed, state

    def lose_plan(self) -> None:
        """Forget the plan, whose block tables are closed. Results on the device become void."""
        self.plan = None
        self.in_flight = 0
        self.is_late = False
        self.leader = None
        self.snapshots = self.row_state = self.launched_state = self.shown_state = None

    @property
    def is_residual(self) -> bool:
        return self.adapter is not None and self.adapter.is_residual

    @property
    def saved_residual_tokens(self) -> int:
        if self.found is None or self.adapter is None:
            return 0
        residual = self.found.residual_of(self.adapter.residual_cache)
        return 0 if residual is None else residual.num_saved

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request.prompt, ChatPrompt)

    @property
    def ignores_eos(self) -> bool:
        """Whether end tokens are ignored. With a grammar they are not."""
        return self.request.sampling.ignore_eos and self.following is None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs and self.num_generated == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the current pass yields prompt logprobs."""
        return self.wants_prompt_logprobs and self.open_plan.scores_prompt

    def note_written(self, num_bytes: int) -> None:
        self.written_bytes += num_bytes


def make_report(generation: RunningRequest, saved: Saved | None) -> Report:
    """Return the report; `saved` is None without an agent."""
    cached, adapter, now = generation.cached, generation.adapter, time.perf_counter()
    policy = Policy.EXACT if adapter is None else adapter.policy
    found = CacheState.WARM if generation.restored_bytes else CacheState.HOT
    return Report(
        agent=generation.request.agent,
        lineage=None if generation.record is None else generation.record.lineage,
        lost_tokens=generation.lost_tokens,
        cache_state=found if cached.own + cached.shared else CacheState.COLD,
        match=generation.match.match,
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_generated,
        cached_tokens=cached,
        computed_tokens=generation.computed_prompt_tokens,
        time_to_first_token_ms=((generation.first_token_at or now) - generation.submitted_at) * 1e3,
        restore_ms=generation.restore_seconds * 1e3,
        restored_bytes=generation.restored_bytes,
        total_ms=(now - generation.submitted_at) * 1e3,
        saved=None if saved is None else saved.error is None,
        save_error=None if saved is None else saved.error,
        policy=policy,
        requested_policy=policy if adapter is None else adapter.requested_policy,
        stepped_down=generation.stepped_down,
        divergence=generation.divergence,
        base_computed_tokens=generation.computed_base_tokens,
        adapter=None if adapter is None else adapter.name,
        activated_at=None if adapter is None else adapter.activated_at,
        written_bytes=generation.written_bytes + (saved.written_bytes if saved else 0),
    )
