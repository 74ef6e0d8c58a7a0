from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from agentcache.agents.disk import Saved
from agentcache.api.policy import Policy
from agentcache.api.report import CacheState, FinishReason, Report, TokenLogprob, Update
from agentcache.api.request import Request
from agentcache.blocks.block_tables import PathBlock
from agentcache.engine.output import Output
from agentcache.errors import AgentCacheError, BrokenInvariant
from agentcache.plans.submitted import SubmittedRequest
from agentcache.store.manifest import AgentRecord

if TYPE_CHECKING:
    from agentcache.models.sampler import Sampler
    from agentcache.models.step import RowState
    from agentcache.plans.plan import Pass, RequestPlan
    from agentcache.text.grammars.compiler import GrammarMatcher

Emit = Callable[[Update | BaseException], None]


class State(Enum):
    """Only `Requests.move` changes a state."""

    NEW = "new"
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SAVING = "saving"
    DONE = "done"
    FAILED = "failed"


# A finish reason keeps the results; an error leaves the agent unchanged.
Outcome = FinishReason | AgentCacheError

LIVE = frozenset({State.WAITING, State.LOADING, State.RUNNING})


@dataclass(eq=False)
class Progress:
    """A request's tokens on the device and its scheduling.

    `is_late`: the next token awaits its grammar mask. `row_state`, `launched_state`: recurrent state after
    `num_computed`, `num_launched` tokens. `shown_state`: last one whose text is sent and thus final, and its tokens.
    The scheduler writes `background`, `passed_over` (times that another went first) and `decoded_at` (its last decode
    step); prefix sharing writes `source`, which computes the next block.
    """

    in_flight: int = 0
    is_late: bool = False
    row_state: RowState | None = None
    launched_state: RowState | None = None
    shown_state: tuple[int, RowState] | None = None
    background: bool = False
    passed_over: int = 0
    decoded_at: int = 0
    source: RunningRequest | None = None
    sampler: Sampler | None = None
    restored_bytes: int = 0
    restore_seconds: float = 0.0

    def launch(self, num_tokens: int, state: RowState | None = None) -> None:
        self.in_flight += num_tokens
        self.launched_state = state

    def land(self, num_tokens: int) -> None:
        self.in_flight -= num_tokens

    def begin(self, state: RowState) -> None:
        self.row_state = self.launched_state = state

    def note_late(self, *, is_late: bool) -> None:
        self.is_late = is_late

    def reset(self) -> None:
        """Reset for another plan. Results on the device become void."""
        self.in_flight, self.is_late = 0, False
        self.row_state = self.launched_state = self.shown_state = self.source = None


@dataclass(eq=False)
class TurnOutput:
    """What leaves the engine, written by the output processor.

    `emit`: called on the engine thread; the last update has a report or is an error. `shown_tokens`: tokens whose text
    is sent. `record`: lineage before the turn. `saved_early`: blocks on their way to disk, by cache.
    """

    text: Output
    emit: Emit
    matcher: GrammarMatcher | None = None
    shown_tokens: int = 0
    first_token_at: float | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    record: AgentRecord | None = None
    saved_early: dict[str, list[PathBlock]] = field(default_factory=dict)
    written_bytes: int = 0


@dataclass(eq=False)
class RunningRequest:
    """A request with `num_computed` of `len(token_ids)` tokens computed. Generated tokens are appended.

    Preemption and failed restores close the plan and lose progress, but no tokens. `num_launched` includes tokens on
    the device. `plan`: None before it is queued.
    """

    submitted: SubmittedRequest
    output: TurnOutput
    progress: Progress = field(default_factory=Progress)
    plan: RequestPlan | None = None
    state: State = State.NEW

    def __post_init__(self) -> None:
        self.token_ids = list(self.submitted.match.transcript.ids)
        self.num_prompt_tokens = self.output.shown_tokens = len(self.token_ids)
        self.progress.background = self.request.is_background

    @property
    def request(self) -> Request:
        return self.submitted.request

    @property
    def open_plan(self) -> RequestPlan:
        if self.plan is None or not self.plan.passes:
            raise BrokenInvariant(f"request {self.request.request_id} has no place in the cache")
        return self.plan

    @property
    def current(self) -> Pass:
        return self.open_plan.passes[0]

    @property
    def num_computed(self) -> int:
        return self.plan.passes[0].writes.num_tokens if self.plan is not None and self.plan.passes else 0

    @property
    def num_launched(self) -> int:
        return self.num_computed + self.progress.in_flight

    @property
    def num_to_launch(self) -> int:
        return len(self.token_ids) - self.num_computed - self.progress.in_flight

    @property
    def num_to_prefill(self) -> int:
        end = self.current.end
        return self.num_to_launch if end is None else min(self.num_to_launch, end - self.num_launched)

    @property
    def can_prefill(self) -> bool:
        """Whether a chunk can start: one at a time, to bound its window slots."""
        source = self.progress.source
        return not self.progress.in_flight and not (source and source.progress.in_flight) and self.num_to_launch > 1

    @property
    def can_decode(self) -> bool:
        """Whether it joins the next decode step."""
        if not self.progress.in_flight:
            return self.num_to_launch == 1
        # The first token is awaited, to be sent at once; after the last, none follows.
        if self.progress.is_late or self.num_to_launch or not 0 < self.num_generated < self.submitted.max_tokens - 1:
            return False
        return self.current.end is None  # such a pass chooses no token

    @property
    def will_decode(self) -> bool:
        return (
            bool(self.progress.in_flight)
            and self.num_to_launch == 0
            and self.num_generated < self.submitted.max_tokens - 1
        )

    def apply_state(self, state: RowState) -> None:
        self.progress.row_state = state
        if self.num_computed <= self.output.shown_tokens:
            self.progress.shown_state = self.num_computed, state

    @property
    def ignores_eos(self) -> bool:
        return self.request.sampling.ignore_eos and self.output.matcher is None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs and self.num_generated == 0

    @property
    def scores_prompt(self) -> bool:
        return self.wants_prompt_logprobs and self.open_plan.scores_prompt


_NEXT = {
    State.NEW: (State.WAITING, State.FAILED),
    State.WAITING: (State.LOADING, State.RUNNING, State.FAILED),
    State.LOADING: (State.RUNNING, State.WAITING, State.FAILED),
    State.RUNNING: (State.WAITING, State.SAVING, State.FAILED),
    State.SAVING: (State.DONE, State.FAILED),
    State.DONE: (),
    State.FAILED: (),
}


class Requests:
    """Requests by state. `waiting` is in order of arrival, preempted ones last."""

    def __init__(self) -> None:
        self.waiting: list[RunningRequest] = []
        self.loading: list[RunningRequest] = []
        self.running: list[RunningRequest] = []
        self.saving: list[RunningRequest] = []
        self._lists = {
            State.WAITING: self.waiting,
            State.LOADING: self.loading,
            State.RUNNING: self.running,
            State.SAVING: self.saving,
        }

    def __iter__(self) -> Iterator[RunningRequest]:
        """Requests that can still be ended."""
        yield from (*self.running, *self.loading, *self.waiting)

    def move(self, running: RunningRequest, state: State) -> None:
        """Change its state. Raises BrokenInvariant."""
        if state not in _NEXT[running.state]:
            raise BrokenInvariant(f"request {running.request.request_id}: {running.state} before {state}")
        if running.state in self._lists:
            self._lists[running.state].remove(running)
        if state in self._lists:
            self._lists[state].append(running)
        running.state = state


def make_report(running: RunningRequest, saved: Saved | None) -> Report:
    """`saved` is None without an agent."""
    submitted, plan, now = running.submitted, running.plan, time.perf_counter()
    assert plan is not None
    cached, adapter = plan.cached, plan.use
    policy = Policy.EXACT if adapter is None else adapter.policy
    found = CacheState.WARM if running.progress.restored_bytes else CacheState.HOT
    return Report(
        agent=running.request.agent,
        lineage=None if running.output.record is None else running.output.record.lineage,
        lost_tokens=plan.lost_tokens,
        cache_state=found if cached.own + cached.shared else CacheState.COLD,
        match=submitted.match.match,
        prompt_tokens=running.num_prompt_tokens,
        completion_tokens=running.num_generated,
        cached_tokens=cached,
        computed_tokens=plan.computed_prompt_tokens,
        time_to_first_token_ms=((running.output.first_token_at or now) - submitted.submitted_at) * 1e3,
        restore_ms=running.progress.restore_seconds * 1e3,
        restored_bytes=running.progress.restored_bytes,
        total_ms=(now - submitted.submitted_at) * 1e3,
        saved=None if saved is None else saved.error is None,
        save_error=None if saved is None else saved.error,
        policy=policy,
        requested_policy=policy if adapter is None else adapter.requested_policy,
        stepped_down=plan.stepped_down,
        divergence=plan.divergence,
        base_computed_tokens=plan.computed_base_tokens,
        adapter=None if adapter is None else adapter.name,
        activated_at=None if adapter is None else adapter.activated_at,
        written_bytes=running.output.written_bytes + (saved.written_bytes if saved else 0),
    )
