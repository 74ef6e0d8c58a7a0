from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from agentcache.agents.caches import KeptCaches
from agentcache.agents.restore import Restored, Restorer
from agentcache.api.report import FinishReason, StepDown
from agentcache.blocks.block_tables import BlockTables
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.engine.device import Device
from agentcache.engine.output_processor import OutputProcessor
from agentcache.engine.running_request import Outcome, Requests, RunningRequest, State
from agentcache.engine.scheduler import Scheduler
from agentcache.errors import AgentCacheError, InvalidRequest, OutOfBlocks, OutOfMemory, Overloaded
from agentcache.plans.planner import Planner


class Admission:
    """Admits requests to the cache: opens plans, restores blocks, preempts."""

    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        caches: KeptCaches,
        device: Device,
        restorer: Restorer,
        planner: Planner,
        end: Callable[[RunningRequest, Outcome], None],
        turns: OutputProcessor,
        fail: Callable[[Collection[RunningRequest], BaseException], None],
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._base = caches.base
        self._cache = caches.base.prefix
        self._device = device
        self._restorer = restorer
        self._planner = planner
        self._end = end
        self._turns = turns
        self._fail = fail

    def plan(self, running: RunningRequest) -> None:
        running.plan = self._planner.plan(running.submitted, running.token_ids)

    def admit(self) -> None:
        while (running := self._scheduler.next_to_admit()) is not None:
            busy = bool(self._requests.running or self._requests.loading)
            try:
                self._open(running, busy)
            except OutOfBlocks as error:
                if busy:
                    self._scheduler.stalled = True
                    return  # running requests will free blocks
                if not self.fall_back(running, StepDown.MEMORY):
                    self._end(running, _too_large(running, error))
            except BaseException as error:
                self._fail([running], error)

    def _open(self, running: RunningRequest, busy: bool) -> None:
        if not busy:
            self._cache.allocator.make_room(len(running.token_ids) + 1)
        assert running.plan is not None
        plan = running.plan = self._planner.resolve(running.plan)
        plan.open(plan.match(), busy=busy)
        if plan.snapshots is not None:
            self._device.free_states()  # of checkpoints evicted for this request
        due = [(cache.name, tables) for cache, tables in plan.tables if tables.loads]
        self._scheduler.admit(running, loading=bool(due))
        if due:
            self._restore(running, due)
        else:
            self._begin_state(running)

    def _begin_state(self, running: RunningRequest) -> None:
        sequence = running.open_plan.sequence
        if sequence.state is not None:
            running.progress.begin(self._device.row_state(sequence.state))  # values: the slot may go
            self._cache.checkpoints.release_start(sequence)

    def _restore(self, running: RunningRequest, due: Sequence[tuple[str, BlockTables]]) -> None:
        name, sequence = due[0]
        self._restorer.restore(sequence, lambda restored: self._restored(running, due, restored), cache=name)

    def _restored(self, running: RunningRequest, due: Sequence[tuple[str, BlockTables]], restored: Restored) -> None:
        sequence = due[0][1]
        if sequence.closed:
            return  # cancelled during the read
        try:
            self._take_restored(running, due, restored)
        except BaseException as error:
            self._fail([running], error)

    def _take_restored(
        self, running: RunningRequest, due: Sequence[tuple[str, BlockTables]], restored: Restored
    ) -> None:
        self._device.evaluate()
        running.progress.restored_bytes += restored.num_bytes
        running.progress.restore_seconds += restored.seconds
        if not restored.complete:
            # Damaged files are in quarantine: match again and compute the rest.
            self.abandon_sequence(running)
        elif due[1:]:
            self._restore(running, due[1:])
            return
        else:
            self._begin_state(running)
        self._requests.move(running, State.RUNNING if restored.complete else State.WAITING)

    def reserve(self, running: RunningRequest, num_tokens: int) -> int:
        """Reserve blocks for `num_tokens`, or fewer; return their number, 0 if the request waits or has ended."""
        while running.state is State.RUNNING:
            cache = self._base
            try:
                for cache, tables, count in running.open_plan.needs(running.progress.in_flight, num_tokens):
                    cache.prefix.reserve(tables, count)
                return num_tokens
            except OutOfBlocks as error:
                if num_tokens > BLOCK_SIZE:
                    num_tokens = _first_half(running.num_launched, num_tokens)
                elif running.progress.in_flight or any(
                    other.progress.in_flight > BLOCK_SIZE for other in self._requests.running
                ):
                    # The step under way may end requests or choose the last token; a large chunk frees window blocks.
                    return 0
                else:
                    self._out_of_blocks(running, error, in_base=cache is self._base)
        return 0

    def _out_of_blocks(self, running: RunningRequest, error: OutOfBlocks, *, in_base: bool) -> None:
        victim = self._scheduler.victim(beyond_base=not in_base)
        if victim is not None:
            self.preempt(victim)
        elif in_base or not self.fall_back(running, StepDown.MEMORY):
            self._end_with_what_there_is(running, _too_large(running, error))

    def fall_back(self, running: RunningRequest, why: StepDown) -> bool:
        """Queue a request without output again, with its plan's fallback; false if it has none."""
        plan = None if running.num_generated or running.plan is None else running.plan.fallback(why)
        if plan is None:
            return False
        self.abandon_sequence(running)
        self._turns.release_further(running)
        running.plan = plan
        if running.state is not State.WAITING:
            self._requests.move(running, State.WAITING)
        return True

    def give_up(self, running: RunningRequest) -> None:
        text = f"the machine has not enough free memory to go on behind {running.num_launched} tokens"
        self._end_with_what_there_is(running, Overloaded(text, code="insufficient_memory"))

    def _end_with_what_there_is(self, running: RunningRequest, error: AgentCacheError) -> None:
        self._end(running, FinishReason.LENGTH if running.num_generated else error)

    def preempt(self, running: RunningRequest) -> None:
        self.abandon_sequence(running)
        self._scheduler.preempt(running)

    def abandon_sequence(self, running: RunningRequest) -> None:
        if running.plan is not None:
            running.plan.abandon()
            running.progress.reset()


def _first_half(start: int, num_tokens: int) -> int:
    half = num_tokens // 2
    to_boundary = half - (start + half) % BLOCK_SIZE
    return to_boundary if to_boundary > 0 else half


def _too_large(running: RunningRequest, error: OutOfBlocks) -> AgentCacheError:
    if isinstance(error, OutOfMemory):
        return Overloaded(str(error), code="insufficient_memory")
    return InvalidRequest(str(error), param=running.request.prompt_param, code="insufficient_memory")
