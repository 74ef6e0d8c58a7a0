"""The engine: requests in, updates out, one step at a time. All of it runs on the one thread that owns MLX."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NoReturn

from agentcache.adapter_settings import Policy
from agentcache.adapters.weights import AdapterWeightSet
from agentcache.agents.caches import KeptCaches
from agentcache.agents.eviction import Eviction
from agentcache.agents.operations import AgentOperations
from agentcache.agents.persistence import Persistence
from agentcache.agents.restore import Restorer
from agentcache.agents.table import AgentTable
from agentcache.engine.admission import Admission
from agentcache.engine.batch import LateToken, Result
from agentcache.engine.catch_up import CatchUp
from agentcache.engine.counters import Counters, cache_stats
from agentcache.engine.device import Device, Step
from agentcache.engine.generation import LIVE, Generation, Outcome, State
from agentcache.engine.passes import Pass
from agentcache.engine.relief import MemoryRelief
from agentcache.engine.requests import Requests
from agentcache.engine.residuals import Residuals
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.trunk import Trunk
from agentcache.engine.turns import Turns
from agentcache.engine.view import EngineView, ServedModel
from agentcache.errors import AgentCacheError, Conflict, EngineStopped, InternalError, RequestCancelled
from agentcache.kv.precision import Precision
from agentcache.models.device_memory import Limits
from agentcache.models.fused import counts as kernel_counts
from agentcache.models.loader import LoadedModel
from agentcache.models.sampler import TokenScore
from agentcache.pressure import Level
from agentcache.ranks.lost import lost_rank
from agentcache.report import CacheStats, FinishReason, StepDown, Traffic
from agentcache.start_progress import Measuring

log = logging.getLogger("agentcache.engine")

# Share of a step's time for which the CPU may look for what an answer's form allows next. Below 1: a step's time is
# measured with this wait in it, so that with all of it the measure would grow from step to step.
_OF_A_STEP = 0.8
_NOTHING_ELSE = 0.05  # seconds to wait where there is nothing else to do, before messages are looked at again


@dataclass(frozen=True)
class Parts:
    """What an engine works with. `open_engine` makes the real ones.

    Args:
        idle_seconds: see `Config.idle_seconds`.
        traffic: what goes between the processes that compute the model together.
        keep_precision: writes a choice for later starts.
    """

    loaded: LoadedModel
    caches: KeptCaches
    device: Device
    requests: Requests
    scheduler: Scheduler
    turns: Turns
    agents: AgentTable
    operations: AgentOperations
    eviction: Eviction
    persistence: Persistence
    restorer: Restorer
    adapters: AdapterWeightSet
    trunk: Trunk
    residuals: Residuals
    served: ServedModel
    limits: Limits
    idle_seconds: float
    traffic: Callable[[], Traffic] = Traffic
    keep_precision: Callable[[Precision], None] = lambda precision: None


class Engine:
    """A model, its cache and the requests on it."""

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
        self.trunk = parts.trunk
        self.residuals = parts.residuals
        self.counters = Counters()
        self.served = parts.served
        self._under_way: Step | None = None
        self._holds_buffers = False  # of chunks that are done
        self._late: list[LateToken] = []  # tokens of batches that are done, but for these
        self._admission = Admission(
            parts.requests,
            parts.scheduler,
            parts.caches,
            parts.device,
            parts.restorer,
            parts.trunk,
            self.end,
            self._step_down,
            self._share,
            self.residuals.cache_of,
            self.fail,
        )
        self._catch_up = CatchUp(parts.requests, parts.caches.base)
        self.relief = MemoryRelief(
            parts.caches, parts.device, parts.scheduler, parts.eviction, parts.trunk, parts.loaded
        )
        self._limits = parts.limits
        self._idle_seconds = parts.idle_seconds
        self._traffic = parts.traffic
        self._keep_precision = parts.keep_precision

    def close(self) -> None:
        """Write what is queued and let go of the cache folder.

        Before it, run what is posted until nothing `is_writing`: outcomes that are posted later change nothing.
        """
        try:
            self.device.wait()
        finally:  # also when the device has failed
            self._limits.restore()
            self.restorer.close()
            self.persistence.close()

    # -- the life of a request ----------------------------------------------------------------------------------------

    def add(self, generation: Generation) -> None:
        """Begin a request's turn and queue it; one that cannot have a turn hears of it."""
        try:
            self._add(generation)
        except EngineStopped:
            raise
        except AgentCacheError as error:
            self.requests.move(generation, State.FAILED)
            generation.emit(error)
        except BaseException as error:
            self.fail([generation], error)

    def _add(self, generation: Generation) -> None:
        self.turns.begin(generation)
        self.device.prepare(generation)
        self.requests.move(generation, State.WAITING)
        use = generation.adapter
        if use is not None and use.is_residual:
            known = self.residuals.known_divergence(generation, use)
            if known is not None:
                generation.divergence = known
                self._step_down(generation, StepDown.DIVERGENCE)

    def end(self, generation: Generation, outcome: Outcome) -> None:
        """The one way out, for whatever reason. What is being saved, or has ended, stays as it is.

        Args:
            outcome: why it is complete, and what it computed is kept; or an error, and its agent is as before.
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

    def fail(self, generations: Collection[Generation], error: BaseException) -> None:
        """End the requests that an unforeseen exception concerns; the others continue if the cache is sound.

        Raises:
            EngineStopped: it is not, or the device does not compute any more, or another rank is lost.
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

    def _drop(self, generation: Generation, failure: InternalError) -> None:
        if generation.state in (State.NEW, State.SAVING):  # its own part of `add` or `end` has failed
            self.requests.move(generation, State.FAILED)
            self._admission.abandon_sequence(generation)
            self.turns.drop(generation)
            generation.emit(failure)
        else:
            self.end(generation, failure)

    def cancel(self, generation: Generation) -> None:
        """Stop working on a request; its agent stays as it was before, its blocks are free at once."""
        if generation.state in LIVE:
            self.counters.cancelled += 1
            self.end(generation, RequestCancelled("the request was cancelled"))

    def preempt(self, generation: Generation) -> None:
        """A running request gives up its sequence, and waits for another."""
        self._admission.preempt(generation)

    def _step_down(self, generation: Generation, why: StepDown) -> None:
        """A request that was to be residual, and has shown nothing yet, waits to be computed exactly."""
        self._admission.abandon_sequence(generation)
        self.turns.step_down(generation, why)
        if generation.state is not State.WAITING:
            self.requests.move(generation, State.WAITING)

    def _share(self, generation: Generation) -> None:
        """Have a waiting request be computed as residuals, unless these are known to be too far from base."""
        assert generation.adapter is not None  # of base there is nothing to share
        use = generation.adapter.settled(Policy.RESIDUAL)
        if self.residuals.known_divergence(generation, use) is None:
            self.turns.use(generation, use)

    def drop_all(self, error: AgentCacheError) -> None:
        """End every request that is not complete; it leaves no trace."""
        for generation in list(self.requests):
            self.end(generation, error)

    def fail_all(self, error: AgentCacheError) -> None:
        """Tell everyone whose request is not complete that nothing more comes, and touch nothing."""
        for generation in list(self.requests):
            generation.emit(error)

    @property
    def is_writing(self) -> bool:
        """Whether something is still on its way to the disk: who waits for its turn to be safe is told when it is."""
        return self.persistence.jobs.is_writing

    # -- one step ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._under_way is not None or self.scheduler.has_work

    def step(self) -> None:
        """Build the next batch while the device computes the last one; start it; hand out what the last one gave.

        It is started before the last one is waited for, so that the device has something to do all the time. What the
        last one gave may show that a row of it is of no use (`BatchRow.is_void`): see `ModelRunner` on its slots.

        Where the form of an answer says what may follow the last one's token, the next one is chosen now that it is
        known; the device is at work on its logits. Rows for which that takes longer sit steps out until it is known.

        An unforeseen exception ends the request whose own part of the step raised it, or those of the step, or, where
        that cannot be told, all that are not complete. Raises EngineStopped where that is not enough (`fail`).
        """
        try:
            self._step()
        except BaseException as error:
            self.fail(list(self.requests), error)

    def _step(self) -> None:
        self.trunk.sweep()
        self._admission.admit()
        self._catch_up.look()
        late = self._choose_late()
        following = self._build(self.scheduler.schedule())
        done, self._under_way = self._under_way, following
        if following is not None:
            try:
                following.start()
            except BaseException as error:
                self._fail_steps(error, following)
        if done is not None:
            try:
                done.wait()
                self._note_time(done)
                self._settle(done)
            except BaseException as error:  # what follows is computed from its tokens
                self._fail_steps(error, done, following)
            self._release_buffers()
        for token in late:
            self._settle_late(token)
        if following is not None and following.awaits_choice:
            try:
                self._late += following.choose(self._patience(following))
            except BaseException as error:
                self._fail_steps(error, following)
        if done is None and following is None and not late and self._late:
            self._late[0].wait(_NOTHING_ELSE)

    def _fail_steps(self, error: BaseException, *steps: Step | None) -> None:
        """End the requests of these steps, whose blocks are free and are not published."""
        if self.served.ranks > 1:  # the other ranks may have computed another part of it
            _stop("a step has failed, and the other ranks are out of step", error)
        rows = [row for step in steps if step is not None for row in step.rows if not row.is_void]
        self.fail({row.generation: None for row in rows}.keys(), error)

    def _build(self, plan: dict[Generation, int]) -> Step | None:
        fitting = self.device.limit(plan)
        if plan and not fitting and self._under_way is None:
            self._admission.give_up(next(iter(plan)))
        counts = {each: self._reserve(each, count) for each, count in fitting.items()}
        # Making room for one may have preempted another.
        rows = [each for each, count in counts.items() if count and each.state is State.RUNNING]
        if not rows:
            return None
        try:
            return self.device.build(rows, counts[rows[0]], self._under_way, contended=self.scheduler.contended)
        except BaseException as error:
            if self.served.ranks > 1:
                _stop("a step cannot be built, and the other ranks wait for it", error)
            # Those that are left are built anew in the next step: what they write is the same.
            self.fail(self.device.at_fault(rows, counts[rows[0]]) or rows, error)
            return None

    def _reserve(self, generation: Generation, count: int) -> int:
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
            self.scheduler.pace.chunk_took(
                batch.seconds, batch.num_tokens, batch.context, contended=batch.contended, whole=whole
            )
        else:
            self.scheduler.pace.step_took(batch.seconds, contended=batch.contended)

    def _release_buffers(self) -> None:
        """Give back the temporaries of chunks once no prompt is left whose next chunk would use their memory again.

        Not after every chunk: a GPU's driver is slow to give memory.
        """
        if self._holds_buffers and not any(generation.can_prefill for generation in self.scheduler.running):
            self._holds_buffers = False
            self.device.release_buffers()

    def _settle(self, batch: Step) -> None:
        """Take what a batch has computed: keys and values into the cache, tokens to those who asked for them."""
        for result in batch.results():
            try:
                self._settle_row(batch, result)
            except BaseException as error:
                self.fail([result.row.generation], error)

    def _settle_row(self, batch: Step, result: Result) -> None:
        generation = result.row.generation
        generation.in_flight -= batch.num_tokens
        if generation.wants_prompt_logprobs:
            self.turns.note_prompt_scores(generation, result.prompt_scores)
        start, overlay = generation.num_computed, result.row.work.overlay
        token_ids = generation.token_ids[start : start + batch.num_tokens]
        if overlay is None:
            self._advance(generation, result.row.work, token_ids)
        else:
            if self.residuals.advance(generation, overlay, token_ids):
                self._catch_up.pass_on()
            self.residuals.leave_windows(overlay)
            if result.token is not None and self._is_too_far(generation):
                return
        if result.state is not None:
            generation.settle_state(result.state)
            self._keep_state(generation)
        if result.token is not None:
            self._take(generation, result.token, result.score)

    def _is_too_far(self, generation: Generation) -> bool:
        """Whether an answer would be too far from its adapter's own, and is computed exactly before any of it shows."""
        if generation.num_generated or not self.residuals.is_too_far(generation):
            return False
        self._step_down(generation, StepDown.DIVERGENCE)
        return True

    def _take(self, generation: Generation, token: int, score: TokenScore | None) -> None:
        before = generation.num_generated
        reason = self.turns.take(generation, token, score)
        self.counters.generated_tokens += generation.num_generated - before
        if reason is not None:
            self.end(generation, reason)

    # -- answers of a form, of which it takes long to know what may follow --------------------------------------------

    def _patience(self, batch: Step) -> float:
        """Seconds to wait for the masks of a batch: no row is delayed before its logits are there."""
        if len(self.scheduler.running) == 1:
            return _NOTHING_ELSE
        return max(0.0, batch.began_at + _OF_A_STEP * self.scheduler.pace.step_seconds - time.perf_counter())

    def _choose_late(self) -> list[LateToken]:
        """Have the device choose the tokens that were late, as far as it is known now which they may be."""
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

    def _settle_late(self, late: LateToken) -> None:
        if late.row.is_void:
            return
        generation = late.row.generation
        try:
            result = late.result()
            generation.is_late = False
            assert result.token is not None  # that is what was waited for
            if generation.overlay is None or not self._is_too_far(generation):
                self._take(generation, result.token, result.score)
        except BaseException as error:
            self.fail([generation], error)

    def _advance(self, generation: Generation, work: Pass, token_ids: list[int]) -> None:
        sequence = work.writes
        published = self.cache.advance(sequence, token_ids)
        generation.drop_passes()
        self.trunk.advance(sequence)
        if published:
            self.turns.save_early(generation, sequence, published)
            self._catch_up.pass_on()
        overlay = generation.overlay
        self.cache.leave_window(sequence, None if overlay is None else overlay.residuals.num_tokens)

    def _keep_state(self, generation: Generation) -> None:
        """Take a snapshot where one is wanted."""
        plan, num_tokens = generation.snapshots, generation.num_computed
        if plan is not None and plan.wants(num_tokens) and generation.row_state is not None:
            slot = self.cache.keep_state(
                generation.open_sequence,
                num_tokens,
                lasts=num_tokens == plan.lasting,
                starts_next=num_tokens == generation.repeated_tokens,
            )
            if slot is not None:
                self.device.keep_state(slot, generation.row_state)

    def seconds_to_rest(self) -> float | None:
        """When `rest` will have something to do; None for never."""
        since = self.persistence.unsaved_since
        return None if since is None else max(0.0, since + self._idle_seconds - time.monotonic())

    def rest(self, *, for_good: bool = False) -> None:
        """Write the last recurrent state of idle agents: after a restart nothing of theirs is computed again.

        Args:
            for_good: all of them: nothing comes any more.
        """
        self.persistence.save_snapshots(time.monotonic(), 0.0 if for_good else self._idle_seconds)

    # -- the whole ----------------------------------------------------------------------------------------------------

    def view(self) -> EngineView:
        """What other threads may know of it; changes between two steps only."""
        return EngineView(self.served, self.agents.view(), self.cache.allocator.max_tokens(), self.relief.level)

    def clear(self) -> None:
        """Evict every block from RAM that no request reads; agents come back warm."""
        self.trunk.blocks.clear()
        for slots, tree in [(each.prefix.slots, each.prefix.tree) for each in self.caches]:
            evicted = True
            while evicted:  # leaves first: each round makes new ones
                evicted = sum(slots.evict(node) for node in list(tree.residents)) > 0
        if self.cache.snapshots is not None:
            for node in list(self.cache.snapshots.nodes):
                self.cache.snapshots.evict(node)

    def relieve(self, level: Level) -> None:
        """Give memory back, as the pressure on it asks for; in the end running requests wait for one another."""
        if self.relief.relieve(level) and (victim := self.scheduler.victim()) is not None:
            self.preempt(victim)

    def measure_precision(self) -> Measuring:
        """Compute one forward pass of an unfinished search. The result is written and holds from the next start on.

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
        """Raise BrokenInvariant unless every block of cache and trunk is accounted for."""
        for cache in self.caches:
            cache.prefix.check_integrity()
        self.trunk.check_integrity()

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
            trunk_ram_bytes=self.loaded.trunk.blocks.nbytes,
            computed_layer_tokens=self.loaded.trunk.layer_tokens,
            saturated_residuals=self.residuals.saturated,
            kernel_checks=kernel_counts.checked,
            kernel_differences=kernel_counts.different,
            memory_limit=self.served.plan.limit,
            memory_pressure=self.relief.level,
            pressure_evicted_blocks=self.relief.evicted_blocks,
            pressure_freed_bytes=self.relief.freed_bytes,
        )


def _stop(why: str, error: BaseException) -> NoReturn:
    """End the engine because of `error`: a rank that is lost is told as that, wherever it is noticed."""
    lost = lost_rank(error)
    if lost is not None:
        raise lost
    if isinstance(error, EngineStopped):
        raise error
    raise EngineStopped(f"{why}: {error}") from error
