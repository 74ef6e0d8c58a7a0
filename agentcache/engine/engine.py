from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from agentcache.agents.caches import KeptCaches
from agentcache.agents.operations import AgentOperations, Eviction
from agentcache.agents.persistence import Persistence
from agentcache.agents.restore import Restorer
from agentcache.agents.table import AgentTable
from agentcache.api.report import FinishReason
from agentcache.api.start_progress import Measuring
from agentcache.api.stats import CacheStats, Traffic
from agentcache.engine.admission import Admission
from agentcache.engine.counters import Counters, cache_stats
from agentcache.engine.device import Device
from agentcache.engine.output_processor import OutputProcessor
from agentcache.engine.prefix_sharing import PrefixSharing
from agentcache.engine.relief import MemoryRelief
from agentcache.engine.running_request import LIVE, Outcome, Requests, RunningRequest, State
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.stepper import Stepper, stop
from agentcache.engine.view import EngineView, ServedModel
from agentcache.errors import AgentCacheError, Conflict, EngineStopped, InternalError, RequestCancelled
from agentcache.kv.packing import Precision
from agentcache.models.fused import counts as kernel_counts
from agentcache.models.loader import LoadedModel
from agentcache.models.memory import Limits
from agentcache.plans.planner import Planner
from agentcache.ranks.lost import lost_rank
from agentcache.system.memory import Level

log = logging.getLogger("agentcache.engine")


@dataclass(frozen=True)
class Parts:
    """An engine's parts, made by `open_engine`."""

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
    planner: Planner
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
        self.planner = parts.planner
        self.counters = Counters()
        self.served = parts.served
        self._admission = Admission(
            parts.requests,
            parts.scheduler,
            parts.caches,
            parts.device,
            parts.restorer,
            parts.planner,
            self.end,
            parts.turns,
            self.fail,
        )
        self.stepper = Stepper(
            parts.device,
            parts.scheduler,
            self._admission,
            PrefixSharing(parts.requests, parts.caches.base),
            parts.turns,
            self.cache,
            self.counters,
            parts.served,
            self.end,
            self.fail,
            parts.hand_over,
        )
        self.relief = MemoryRelief(parts.caches, parts.device, parts.scheduler, parts.eviction, parts.planner)
        self._limits = parts.limits
        self._idle_seconds = parts.idle_seconds
        self._traffic = parts.traffic
        self._keep_precision = parts.keep_precision

    def close(self) -> None:
        """Finish queued writes and release the cache folder. First run posted functions until nothing `is_writing`."""
        try:
            self.device.wait()
        finally:  # also if the device has failed
            self._limits.restore()
            self.restorer.close()
            self.persistence.close()

    def add(self, running: RunningRequest) -> None:
        """Queue a request. Errors go to it."""
        try:
            self._add(running)
        except EngineStopped:
            raise
        except AgentCacheError as error:
            self.requests.move(running, State.FAILED)
            running.output.emit(error)
        except BaseException as error:
            self.fail([running], error)

    def _add(self, running: RunningRequest) -> None:
        self._admission.plan(running)
        self.turns.begin(running)
        self.device.prepare(running)
        self.requests.move(running, State.WAITING)

    def end(self, running: RunningRequest, outcome: Outcome) -> None:
        if running.state not in LIVE:
            return
        self.scheduler.stalled = False  # its blocks are free, or will be
        if isinstance(outcome, FinishReason):
            self.requests.move(running, State.SAVING)
            cached = running.open_plan.cached
            self.counters.cached_tokens += cached.own + cached.shared
            self.turns.finish(running, outcome)
        else:
            self.requests.move(running, State.FAILED)
            self._admission.abandon_sequence(running)
            self.turns.drop(running)
            self.stepper.release_buffers()
            running.output.emit(outcome)

    def fail(self, requests: Collection[RunningRequest], error: BaseException) -> None:
        """Fail requests after an unforeseen exception. Raises EngineStopped if cache, device or ranks are unsound."""
        if isinstance(error, EngineStopped) or lost_rank(error) is not None:
            stop("a rank is lost", error)
        names = ", ".join(each.request.request_id for each in requests)
        log.error("requests that have failed: %s", names or "none", exc_info=error)
        self.counters.failed += len(requests)
        failure = InternalError("the request has failed; the log says how")
        try:
            for running in requests:
                self._drop(running, failure)
            self.device.evaluate()
            self.check_integrity()
        except BaseException as second:
            stop("the cache is not sound after a failure", second)

    def _drop(self, running: RunningRequest, failure: InternalError) -> None:
        if running.state in (State.NEW, State.SAVING):  # its part of `add` or `end` has failed
            self.requests.move(running, State.FAILED)
            self._admission.abandon_sequence(running)
            self.turns.drop(running)
            running.output.emit(failure)
        else:
            self.end(running, failure)

    def cancel(self, running: RunningRequest) -> None:
        if running.state in LIVE:
            self.counters.cancelled += 1
            self.end(running, RequestCancelled("the request was cancelled"))

    def preempt(self, running: RunningRequest) -> None:
        self._admission.preempt(running)

    def drop_all(self, error: AgentCacheError) -> None:
        for running in list(self.requests):
            self.end(running, error)

    def fail_all(self, error: AgentCacheError) -> None:
        """Send an error to all requests; change nothing else."""
        for running in list(self.requests):
            running.output.emit(error)

    @property
    def is_writing(self) -> bool:
        return self.persistence.jobs.is_writing

    @property
    def has_work(self) -> bool:
        return self.stepper.is_busy or self.scheduler.has_work

    def step(self) -> None:
        """Run one step. An exception fails the request or the step that raised it, else all requests (`fail`)."""
        try:
            self.stepper.step()
        except BaseException as error:
            self.fail(list(self.requests), error)

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
        """Evict all unread blocks and checkpoints from RAM."""
        self.planner.clear()
        for slots, tree in [(each.prefix.slots, each.prefix.tree) for each in self.caches]:
            evicted = True
            while evicted:  # leaves first
                evicted = sum(slots.evict(node) for node in list(tree.residents)) > 0
        if self.cache.snapshots is not None:
            for node in list(self.cache.snapshots.nodes):
                self.cache.snapshots.evict(node)

    def relieve(self, level: Level) -> None:
        """Free memory, or else preempt a request."""
        if self.relief.relieve(level) and (victim := self.scheduler.victim()) is not None:
            self.preempt(victim)

    def measure_precision(self) -> Measuring:
        """Compute one pass of the precision search. Raises Conflict, StoreError, FileUnavailable."""
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
        self.planner.check_integrity()

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
            **self.planner.stats,
            kernel_checks=kernel_counts.checked,
            kernel_differences=kernel_counts.different,
            memory_limit=self.served.plan.limit,
            memory_pressure=self.relief.level,
            pressure_evicted_blocks=self.relief.evicted_blocks,
            pressure_freed_bytes=self.relief.freed_bytes,
        )
