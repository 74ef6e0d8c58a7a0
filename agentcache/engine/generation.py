"""One request being worked on: everything that changes about it, in one object."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from agentcache.adapter_settings import Policy
from agentcache.adapters.activation import AdapterUse
from agentcache.agents.saved import Saved
from agentcache.blocks.keys import BLOCK_SIZE, Producer
from agentcache.blocks.prefix_match import PromptMatch
from agentcache.blocks.sequence import CacheSequence, LaneBlock
from agentcache.blocks.snapshot_plan import SnapshotPlan
from agentcache.blocks.trunk_match import TrunkMatch
from agentcache.engine.output import Output
from agentcache.engine.passes import Overlay, Pass, plan_passes
from agentcache.errors import AgentCacheError, BrokenInvariant
from agentcache.report import CachedTokens, CacheState, FinishReason, Report, StepDown, TokenLogprob, Update
from agentcache.request import ChatPrompt, Request
from agentcache.store.manifest import AgentRecord

if TYPE_CHECKING:
    from agentcache.engine.messages import Submit
    from agentcache.models.recurrent import RowState
    from agentcache.models.sampler import Sampler
    from agentcache.models.text.grammars.compiler import Following

Emit = Callable[[Update | BaseException], None]


class State(Enum):
    """Where in its life a request is: from NEW on one after the other, but one that loses its sequence WAITS again.

    Only `Requests.move` changes it. WAITING, LOADING and RUNNING end in FAILED too: refused, cancelled, shut down.
    """

    NEW = "new"
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SAVING = "saving"
    DONE = "done"
    FAILED = "failed"


# How a request ends: with a reason, and what it computed is kept; or with an error, and it leaves no trace.
Outcome = FinishReason | AgentCacheError

LIVE = frozenset({State.WAITING, State.LOADING, State.RUNNING})


@dataclass(eq=False)
class Generation:
    """A request from admission to its last update.

    `num_computed` against `len(token_ids)` is the whole state of progress: prompt and generated tokens alike are known
    first and computed later, in pieces of any size. Sequence and counters survive neither preemption nor a failed
    restore; the tokens do. `num_launched` runs ahead of `num_computed` by what the device is at work on: its result is
    not known yet, so nothing but the next launch counts on it.

    Attributes:
        match: the prompt as tokens, and how it relates to the agent's transcript.
        emit: gets every update, the last of which has a report or is an error; called on the engine thread.
        submitted: the message that it came as.
        state: see `State`.
        sampler: chooses its tokens, once it is queued.
        token_ids: prompt, then what was generated.
        sequence: what it holds of the cache; None while waiting. Of a residual request, that in base's.
        overlay: what a residual request writes on top of it.
        stepped_down: why a request that was to be residual is not as it was to be; None where it is.
        divergence: of what the adapter has read of its prompt from what it would have computed, where it was measured.
        saved_residuals: as `saved_early`, of residuals.
        in_flight: tokens of it that the device is at work on.
        passes: that compute what is not computed yet, in order, the first of them at work; none without a sequence.
        background: it lets others go first; the scheduler ends that when it has waited enough.
        passed_over: how often others went before it.
        decoded_at: number of the last step that it decoded in.
        found: the agent's lineage that the prompt was matched with; None for another beginning.
        goes_on: as in `Submit`.
        record: the lineage that this turn will be, before the turn.
        producer: who computes the keys and values of its tokens; None for base.
        adapter: what it is computed with, the whole way; None for base.
        computed_base_tokens: of the prompt, how many the unadapted model computes.
        own_tokens: leading prompt tokens that `found` holds already.
        expected_tokens: of these, how many were computed for it, and are not to be computed again.
        lost_tokens: of these, how many were neither in RAM nor on disk, and had to be.
        saved_early: blocks that were sent to disk before the turn's end.
        system_tokens: leading prompt tokens that other conversations may share, as far as that is known.
        repeated_tokens: as in `Submit`.
        snapshots: where its recurrent state is kept; None for a model without.
        row_state: that behind `num_computed` tokens, or None where there are none; `launched_state` is the one behind
            `num_launched`, which the device may be at work on.
        shown_state: the last one, and its number of tokens, with all text before it shown: none of that is taken back.
        shown_tokens: as many tokens have all their text shown.
        following: what may come next in an answer of a certain form; None for any.
        is_late: the token behind what is computed is not chosen yet, for it is not known yet which it may be.
        leader: another request that has begun with its next block, which it takes when that is full (`CatchUp`).
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
    sequence: CacheSequence | None = None
    overlay: Overlay | None = None
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
    saved_early: list[LaneBlock] = field(default_factory=list)
    saved_residuals: list[LaneBlock] = field(default_factory=list)
    found: AgentRecord | None = None
    goes_on: bool = False
    record: AgentRecord | None = None
    producer: Producer | None = None
    adapter: AdapterUse | None = None
    in_flight: int = 0
    passes: list[Pass] = field(default_factory=list)
    passed_over: int = 0
    decoded_at: int = 0
    system_tokens: int = 0
    repeated_tokens: int = 0
    snapshots: SnapshotPlan | None = None
    row_state: RowState | None = None
    launched_state: RowState | None = None
    shown_state: tuple[int, RowState] | None = None
    shown_tokens: int = 0
    following: Following | None = None
    is_late: bool = False
    leader: Generation | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.match.transcript.ids)
        self.num_prompt_tokens = self.shown_tokens = len(self.token_ids)
        self.background = self.request.is_background

    @property
    def open_sequence(self) -> CacheSequence:
        """Its sequence, once it is admitted."""
        if self.sequence is None:
            raise BrokenInvariant(f"request {self.request.request_id} has no sequence in the cache")
        return self.sequence

    @property
    def current(self) -> Pass:
        """The pass at work; what is under way is not done."""
        return self.passes[0]

    @property
    def last_for_adapter(self) -> int:
        """The known token from which on an adapter has to compute that others need not, for its logits: the last one,
        or the first where all of the prompt's are wanted."""
        return 0 if self.wants_prompt_logprobs else len(self.token_ids) - 1

    @property
    def num_computed(self) -> int:
        """Tokens behind the current pass."""
        return self.passes[0].writes.num_tokens if self.passes else 0

    @property
    def num_launched(self) -> int:
        return self.num_computed + self.in_flight

    @property
    def num_to_launch(self) -> int:
        """Known tokens whose computation has not begun."""
        return len(self.token_ids) - self.num_computed - self.in_flight

    @property
    def num_to_prefill(self) -> int:
        """Known tokens that the current pass is to compute, one after the other."""
        end = self.current.end
        return self.num_to_launch if end is None else min(self.num_to_launch, end - self.num_launched)

    @property
    def can_prefill(self) -> bool:
        """Whether its turn may come for a chunk. One at a time: its slots then stay within a window's bound."""
        led = self.leader is not None and self.leader.in_flight
        return not self.in_flight and not led and self.num_to_launch > 1

    @property
    def can_decode(self) -> bool:
        """Whether it may join the next decode step: with a known token, or with the one about to be chosen.

        The first token is waited for: it is to be shown at once. So is the last one, behind which nothing follows.
        """
        if not self.in_flight:
            return self.num_to_launch == 1
        if self.is_late or self.num_to_launch or not 0 < self.num_generated < self.max_tokens - 1:
            return False
        return self.passes[0].end is None  # else no token is about to be chosen

    @property
    def will_decode(self) -> bool:
        """Whether it can decode once what is under way is done, which shows its first token, say."""
        return bool(self.in_flight) and self.num_to_launch == 0 and self.num_generated < self.max_tokens - 1

    def take_sequence(
        self,
        sequence: CacheSequence,
        ahead: TrunkMatch | None = None,
        overlay: Overlay | None = None,
        at_once: int = BLOCK_SIZE,
    ) -> None:
        """Its sequence, and the passes that compute what is not there yet, given what the trunk has.

        Args:
            overlay: a residual request's.
            at_once: tokens of its prompt that are computed at once, at most.
        """
        self.sequence, self.overlay = sequence, overlay
        self.passes = plan_passes(self.adapter, sequence, ahead, overlay, self.last_for_adapter, at_once)
        self.drop_passes()

    def drop_passes(self) -> None:
        """Those that are done are over, and the next one is at work."""
        while len(self.passes) > 1 and self.passes[0].is_done:
            del self.passes[0]

    def note_caught_up(self, begin: int, end: int) -> None:
        """The current pass need not compute these tokens of the prompt: another request has."""
        if self.num_generated:
            return
        num_tokens, cached = end - begin, self.cached
        if self.overlay is None:
            start = self.num_prompt_tokens if self.producer is None else self.producer.start
            self.computed_base_tokens -= max(0, min(end, start) - begin)
        elif self.current.computes is None:
            self.computed_base_tokens -= num_tokens
        if self.overlay is None or self.current.overlay is not None:
            residual = None if cached.residual is None else cached.residual + num_tokens
            self.cached = CachedTokens(cached.own, cached.shared + num_tokens, residual)
            if self.overlay is None or self.current.computes is not None:
                self.computed_prompt_tokens -= num_tokens

    def begin_state(self, state: RowState) -> None:
        """Its row continues from this recurrent state."""
        self.row_state = self.launched_state = state

    def settle_state(self, state: RowState) -> None:
        """What the device has computed has this recurrent state behind it."""
        self.row_state = state
        if self.num_computed <= self.shown_tokens:
            self.shown_state = self.num_computed, state

    def lose_sequence(self) -> None:
        """Its sequence has been given up; what the device computes for it has no meaning any more."""
        self.sequence = self.overlay = None
        self.in_flight = 0
        self.is_late = False
        self.leader = None
        self.passes = []
        self.snapshots = self.row_state = self.launched_state = self.shown_state = None

    @property
    def is_residual(self) -> bool:
        return self.adapter is not None and self.adapter.is_residual

    @property
    def saved_residual_tokens(self) -> int:
        """Of how many tokens the conversation that it goes on has residuals of its adapter."""
        if self.found is None or self.adapter is None:
            return 0
        residual = self.found.residual_of(self.adapter.residual_cache)
        return 0 if residual is None else residual.num_saved

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request.prompt, ChatPrompt)

    @property
    def ignores_eos(self) -> bool:
        """Whether it goes on where the model would end. A form that is complete has no other end."""
        return self.request.sampling.ignore_eos and self.following is None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of the prompt are still wanted."""
        return self.request.sampling.prompt_logprobs and self.num_generated == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether they are to be had of the current pass. Of a residual request's, the adapter's give them."""
        return self.wants_prompt_logprobs and (self.overlay is None or self.current.computes is not None)

    def note_written(self, num_bytes: int) -> None:
        """Blocks written before the turn's end count for it too."""
        self.written_bytes += num_bytes


def make_report(generation: Generation, saved: Saved | None) -> Report:
    """What a finished generation cost and reused; `saved` is None for one without an agent."""
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
