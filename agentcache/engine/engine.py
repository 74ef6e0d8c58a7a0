from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from agentcache.adapters.weights import AdapterWeightSet
from agentcache.agents.caches import KeptCaches
from agentcache.agents.operations import AgentOperations, Eviction
from agentcache.agents.persistence import Persistence
from agentcache.agents.restore import Restorer
from agentcache.agents.table import AgentTable
from agentcache.api.policy import Policy
from agentcache.api.report import FinishReason, StepDown
from agentcache.api.start_progress import Measuring
from agentcache.api.stats import CacheStats, Traffic
from agentcache.engine.admission import Admission
from agentcache.engine.batch import LateToken, Result
from agentcache.engine.counters import Counters, cache_stats
from agentcache.engine.device import Device, Step
from agentcache.engine.hidden_states import HiddenStatePlanner
from agentcache.engine.output_processor import OutputProcessor
from agentcache.engine.prefix_sharing import PrefixSharing
from agentcache.engine.relief import MemoryRelief
from agentcache.engine.requests import Requests
from agentcache.engine.residuals import Residuals
from agentcache.engine.running_request import LIVE, Outcome, RunningRequest, State
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.view import EngineView, ServedModel
from agentcache.errors import AgentCacheError, Conflict, EngineStopped, InternalError, RequestCancelled
from agentcache.kv.packing import Precision
from agentcache.models.fused import counts as kernel_counts
from agentcache.models.loader import LoadedModel
from agentcache.models.memory import Limits
from agentcache.models.sampler import TokenScore
from agentcache.ranks.lost import lost_rank
from agentcache.system.memory import Level

log = logging.getLogger("agentcache.engine")

# Share of a decode step's time to wait for grammar masks. Below 1, as the measured step time includes this wait.
_OF_A_STEP = 0.8
_NOTHING_ELSE = 0.05  # seconds to wait for a mask if idle, before reading messages


@dataclass(frozen=True)
class Parts:
    """The parts of an engine, made by `open_engine`. `hand_over` delivers replies before a start that takes long."""

    loaded: LoadedModel
    caches: KeptCaches
    device: Device
    requests: Requests
    scheduler: Scheduler
    turns: OutputProcessor
    agents: AgentTable
    operations: AgentOperations
    eviction: Eviction
    persistence: Persistence
    restorer: Restorer
    adapters: AdapterWeightSet
    hidden_states: HiddenStatePlanner
    residuals: Residuals
    served: ServedModel
    limits: Limits
    idle_seconds: float
    traffic: Callable[[], Traffic] = Traffic
    keep_precision: Callable[[Precision], None] = lambda precision: None
    hand_over: Callable[[], None] = lambda: None


class Engine:
    """A model, its cache and the requests on it. For the thread that owns MLX."""

    def __init__(self, parts: Parts) -> None:
        self.loaded = parts.loaded
        self.caches = parts.caches
        self.cache = parts.caches.base.prefix
        self.device = parts.device
        self.requests = parts.requests
        self.scheduler = parts.scheduler
        self.turns = parts.turns
        self.agents = parts.agents
        self.operations = parts.operations
        self.eviction = parts.eviction
        self.persistence = parts.persistence
        self.restorer = parts.restorer
        self.adapters = parts.adapters
        self.hidden_states = parts.hidden_states
        self.residuals = parts.residuals
        self.counters = Counters()
        self.served = parts.served
        self._hand_over = parts.hand_over
        self._under_way: Step | None = None
        self._holds_buffers = False  # temporaries of finished chunks
        self._late: list[LateToken] = []  # missing tokens of finished batches
        self._admission = Admission(
            parts.requests,
            parts.scheduler,
            parts.caches,
            parts.device,
            parts.restorer,
            parts.hidden_states,
            self.end,
            self._step_down,
            self._share,
            self.residuals.cache_of,
            self.fail,
        )
        self._catch_up = PrefixSharing(parts.requests, parts.caches.base)
        self.relief = MemoryRelief(
            parts.caches, parts.device, parts.scheduler, parts.eviction, parts.hidden_states, parts.loaded
        )
        self._limits = parts.limits
        self._idle_seconds = parts.idle_seconds
        self._traffic = parts.traffic
        self._keep_precision = parts.keep_precision

    def close(self) -> None:
        """Finish queued writes and release the cache folder.

        First run posted functions until nothing `is_writing`: later outcomes have no effect.
        """
        try:
            self.device.wait()
        finally:  # also if the device has failed
            self._limits.restore()
            self.restorer.close()
            self.persistence.close()

    def add(self, generation: RunningRequest) -> None:
        """Queue a request's turn. Errors go to the request."""
        try:
            self._add(generation)
        except EngineStopped:
            raise
        except AgentCacheError as error:
            self.requests.move(generation, State.FAILED)
            generation.emit(error)
        except BaseException as error:
            self.fail([generation], error)

    def _add(self, generation: RunningRequest) -> None:
        self.turns.begin(generation)
        self.device.prepare(generation)
        self.requests.move(generation, State.WAITING)
        use = generation.adapter
        if use is not None and use.is_residual:
            known = self.residuals.known_divergence(generation, use)
            if known is not None:
                generation.divergence = known
                self._step_down(generation, StepDown.DIVERGENCE)

    def end(self, generation: RunningRequest, outcome: Outcome) -> None:
        """Complete or fail a live request.

        `outcome`: a reason keeps its results; an error leaves its agent unchanged.
        """
        if generation.state not in LIVE:
            return
        self.scheduler.stalled = False  # its blocks are free, or will be
        if isinstance(outcome, FinishReason):
            self.requests.move(generation, State.SAVING)
            generation.finish_reason = outcome
            self.counters.cached_tokens += generation.cached.own + generation.cached.shared
            self.turns.finish(generation)
        else:
            self.requests.move(generation, State.FAILED)
            self._admission.abandon_sequence(generation)
            self.turns.drop(generation)
            self._release_buffers()
            generation.emit(outcome)

    def fail(self, generations: Collection[RunningRequest], error: BaseException) -> None:
        """Fail requests after an unforeseen exception. Other requests continue.

        Raises:
            EngineStopped: the cache is not sound, the device has failed, or a rank is lost.
        """
        if isinstance(error, EngineStopped) or lost_rank(error) is not None:
            _stop("a rank is lost", error)
        names = ", ".join(each.request.request_id for each in generations)
        log.error("requests that have failed: %s", names or "none", exc_info=error)
        self.counters.failed += len(generations)
        failure = InternalError("the request has failed; the log says how")
        try:
            for generation in generations:
                self._drop(generation, failure)
            self.device.evaluate()
            self.check_integrity()
        except BaseException as second:
            _stop("the cache is not sound after a failure", second)

    def _drop(self, generation: RunningRequest, failure: InternalError) -> None:
        if generation.state in (State.NEW, State.SAVING):  # its part of `add` or `end` has failed
            self.requests.move(generation, State.FAILED)
            self._admission.abandon_sequence(generation)
            self.turns.drop(generation)
            generation.emit(failure)
        else:
            self.end(generation, failure)

    def cancel(self, generation: RunningRequest) -> None:
        """Cancel a request. Its agent is unchanged."""
        if generation.state in LIVE:
            self.counters.cancelled += 1
            self.end(generation, RequestCancelled("the request was cancelled"))

    def preempt(self, generation: RunningRequest) -> None:
        self._admission.preempt(generation)

    def _step_down(self, generation: RunningRequest, why: StepDown) -> None:
        """Queue a residual request again as exact, before any output."""
        self._admission.abandon_sequence(generation)
        self.turns.step_down(generation, why)
        if generation.state is not State.WAITING:
            self.requests.move(generation, State.WAITING)

    def _share(self, generation: RunningRequest) -> None:
        """Make a waiting request residual, unless its known divergence is too high."""
        assert generation.adapter is not None
        use = generation.adapter.resolved(Policy.RESIDUAL)
        if self.residuals.known_divergence(generation, use) is None:
            self.turns.use(generation, use)

    def drop_all(self, error: AgentCacheError) -> None:
        for generation in list(self.requests):
            self.end(generation, error)

    def fail_all(self, error: AgentCacheError) -> None:
        """Send an error to all incomplete requests and change nothing else."""
        for generation in list(self.requests):
            generation.emit(error)

    @property
    def is_writing(self) -> bool:
        return self.persistence.jobs.is_writing

    @property
    def has_work(self) -> bool:
        return self._under_way is not None or self.scheduler.has_work

    def step(self) -> None:
        """Build and start the next batch, then await the previous one and apply its results.

        So the device stays busy. Results may void rows of the next batch (`BatchRow.is_void`; see `ModelRunner`). With
        a grammar, its tokens are chosen after the previous ones; a row whose mask is late skips steps.

        An exception fails the request or the step that raised it, else all requests. Raises EngineStopped if that does
        not suffice (`fail`).
        """
        try:
            self._step()
        except BaseException as error:
            self.fail(list(self.requests), error)

    def _step(self) -> None:
        self.hidden_states.sweep()
        self._admission.admit()
        self._catch_up.look()
        late = self._choose_late()
        following = self._build(self.scheduler.schedule())
        done, self._under_way = self._under_way, following
        if done is not None and following is not None and following.starts_alone:
            self._complete(done, following)
            done = None
            self._hand_over()
        if following is not None:
            try:
                following.start()
            except BaseException as error:
                self._fail_steps(error, following)
        if done is not None:
            self._complete(done, following)
        for token in late:
            self._apply_late(token)
        if following is not None and following.awaits_choice:
            try:
                self._late += following.choose(self._patience(following))
            except BaseException as error:
                self._fail_steps(error, following)
        if done is None and following is None and not late and self._late:
            self._late[0].wait(_NOTHING_ELSE)

    def _complete(self, done: Step, following: Step | None) -> None:
        """Await a batch and apply its results."""
        try:
            done.wait()
            self._note_time(done)
            self._apply(done)
        except BaseException as error:  # `following` depends on its tokens
            self._fail_steps(error, done, following)
        self._release_buffers()

    def _fail_steps(self, error: BaseException, *steps: Step | None) -> None:
        """Fail the requests of these steps. Their blocks are not published."""
        if self.served.ranks > 1:  # other ranks may have computed another part
            _stop("a step has failed, and the other ranks are out of step", error)
        rows = [row for step in steps if step is not None for row in step.rows if not row.is_void]
        self.fail({row.generation: None for row in rows}.keys(), error)

    def _build(self, plan: dict[RunningRequest, int]) -> Step | None:
        fitting = self.device.limit(plan)
        if plan and not fitting and self._under_way is None:
            self._admission.give_up(next(iter(plan)))
        counts = {each: self._reserve(each, count) for each, count in fitting.items()}
        # Reserving for one request may have preempted another.
        rows = [each for each, count in counts.items() if count and each.state is State.RUNNING]
        if not rows:
            return None
        try:
            return self.device.build(rows, counts[rows[0]], self._under_way, contended=self.scheduler.contended)
        except BaseException as error:
            if self.served.ranks > 1:
                _stop("a step cannot be built, and the other ranks wait for it", error)
            # The remaining rows are built again in the next step, with equal writes.
            self.fail(self.device.at_fault(rows, counts[rows[0]]) or rows, error)
            return None

    def _reserve(self, generation: RunningRequest, count: int) -> int:
        try:
            return self._admission.reserve(generation, count)
        except BaseException as error:
            self.fail([generation], error)
            return 0

    def _note_time(self, batch: Step) -> None:
        self.counters.note(batch)
        if batch.is_chunk:
            self._holds_buffers = True
            whole = batch.rows[0].work.cut == 0
            self.scheduler.token_budget.chunk_took(
                batch.seconds, batch.num_tokens, batch.context, contended=batch.contended, whole=whole
            )
        else:
            self.scheduler.token_budget.step_took(batch.seconds, contended=batch.contended)

    def _release_buffers(self) -> None:
        """Free temporaries of chunks once no prompt can reuse them: GPU drivers allocate slowly."""
        if self._holds_buffers and not any(generation.can_prefill for generation in self.scheduler.running):
            self._holds_buffers = False
            self.device.release_buffers()

    def _apply(self, batch: Step) -> None:
        for result in batch.results():
            try:
                self._apply_row(batch, result)
            except BaseException as error:
                self.fail([result.row.generation], error)

    def _apply_row(self, batch: Step, result: Result) -> None:
        generation = result.row.generation
        generation.in_flight -= batch.num_tokens
        if generation.wants_prompt_logprobs:
            self.turns.note_prompt_scores(generation, result.prompt_scores)
        self._advance(generation, batch.num_tokens)
        if result.token is not None and self._is_too_far(generation):
            return
        if result.state is not None:
            generation.apply_state(result.state)
            self._keep_state(generation)
        if result.token is not None:
            self._take(generation, result.token, result.score)

    def _is_too_far(self, generation: RunningRequest) -> bool:
        if generation.residual_kv is None or generation.num_generated or not self.residuals.is_too_far(generation):
            return False
        self._step_down(generation, StepDown.DIVERGENCE)
        return True

    def _take(self, generation: RunningRequest, token: int, score: TokenScore | None) -> None:
        before = generation.num_generated
        reason = self.turns.take(generation, token, score)
        self.counters.generated_tokens += generation.num_generated - before
        if reason is not None:
            self.end(generation, reason)

    def _patience(self, batch: Step) -> float:
        """Seconds to wait for masks: no row waits longer than for its logits."""
        if len(self.scheduler.running) == 1:
            return _NOTHING_ELSE
        return max(0.0, batch.began_at + _OF_A_STEP * self.scheduler.token_budget.step_seconds - time.perf_counter())

    def _choose_late(self) -> list[LateToken]:
        self._late = [token for token in self._late if not token.row.is_void]
        ready = [token for token in self._late if not token.row.generation.in_flight and token.is_ready]
        return [token for token in ready if self._start_late(token)]

    def _start_late(self, token: LateToken) -> bool:
        self._late.remove(token)
        try:
            token.start()
        except BaseException as error:
            self.fail([token.row.generation], error)
            return False
        return True

    def _apply_late(self, late: LateToken) -> None:
        if late.row.is_void:
            return
        generation = late.row.generation
        try:
            result = late.result()
            generation.is_late = False
            assert result.token is not None
            if not self._is_too_far(generation):
                self._take(generation, result.token, result.score)
        except BaseException as error:
            self.fail([generation], error)

    def _advance(self, generation: RunningRequest, num_tokens: int) -> None:
        plan, start = generation.open_plan, generation.num_computed
        token_ids = generation.token_ids[start : start + num_tokens]
        has_filled = plan.advance(token_ids, partial(self.turns.save_early, generation))
        self.hidden_states.advance(plan.sequence)
        if has_filled:
            self._catch_up.pass_on()
        plan.leave_windows()

    def _keep_state(self, generation: RunningRequest) -> None:
        plan, num_tokens = generation.snapshots, generation.num_computed
        if plan is not None and plan.wants(num_tokens) and generation.row_state is not None:
            slot = self.cache.checkpoints.keep(
                generation.open_sequence,
                num_tokens,
                lasts=num_tokens == plan.lasting,
                starts_next=num_tokens == generation.repeated_tokens,
            )
            if slot is not None:
                self.device.keep_state(slot, generation.row_state)

    def seconds_to_rest(self) -> float | None:
        """Seconds until `rest` has work; None for never."""
        since = self.persistence.unsaved_since
        return None if since is None else max(0.0, since + self._idle_seconds - time.monotonic())

    def rest(self, *, for_good: bool = False) -> None:
        """Write the last checkpoints of idle agents; with `for_good`, of all agents."""
        self.persistence.save_snapshots(time.monotonic(), 0.0 if for_good else self._idle_seconds)

    def view(self) -> EngineView:
        return EngineView(self.served, self.agents.view(), self.cache.allocator.max_tokens(), self.relief.level)

    def clear(self) -> None:
        """Evict all unread blocks from RAM. Saved agents stay warm."""
        self.hidden_states.blocks.clear()
        for slots, tree in [(each.prefix.slots, each.prefix.tree) for each in self.caches]:
            evicted = True
            while evicted:  # leaves first
                evicted = sum(slots.evict(node) for node in list(tree.residents)) > 0
        if self.cache.snapshots is not None:
            for node in list(self.cache.snapshots.nodes):
                self.cache.snapshots.evict(node)

    def relieve(self, level: Level) -> None:
        """Free memory. If nothing is left to free, preempt a request."""
        if self.relief.relieve(level) and (victim := self.scheduler.victim()) is not None:
            self.preempt(victim)

    def measure_precision(self) -> Measuring:
        """Compute one forward pass of the precision search. Its result applies from the next start.

        Raises:
            Conflict: the precision is final.
            StoreError, FileUnavailable: the result could not be written.
        """
        search = self.loaded.search
        if search is None:
            raise Conflict("the precision of keys and values is chosen")
        search.advance()
        if search.precision is not None:
            self._keep_precision(search.precision)
        return search.measuring

    def check_integrity(self) -> None:
        for cache in self.caches:
            cache.prefix.check_integrity()
        self.hidden_states.check_integrity()

    def stats(self) -> CacheStats:
        stats = cache_stats(
            self.caches, self.device, self.requests, self.scheduler, self.persistence, self.counters, len(self.agents)
        )
        traffic = self._traffic()
        return replace(
            stats,
            ranks=traffic.ranks,
            rank_messages=traffic.messages,
            rank_sent_bytes=traffic.sent_bytes,
            adapter_ram_bytes=self.adapters.nbytes,
            trunk_ram_bytes=self.loaded.hidden_states.blocks.nbytes,
            computed_layer_tokens=self.loaded.hidden_states.layer_tokens,
            saturated_residuals=self.residuals.saturated,
            kernel_checks=kernel_counts.checked,
            kernel_differences=kernel_counts.different,
            memory_limit=self.served.plan.limit,
            memory_pressure=self.relief.level,
            pressure_evicted_blocks=self.relief.evicted_blocks,
            pressure_freed_bytes=self.relief.freed_bytes,
        )


def _stop(why: str, error: BaseException) -> NoReturn:
    lost = lost_rank(error)
    if lost is not None:
        raise lost
    if isinstance(error, EngineStopped):
        raise error
    raise EngineStopped(f"{why}: {error}") from error
