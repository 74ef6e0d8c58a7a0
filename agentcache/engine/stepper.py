from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn

from agentcache.blocks.prefix_cache import PrefixCache
from agentcache.engine.admission import Admission
from agentcache.engine.batch import LateToken, Result
from agentcache.engine.counters import Counters
from agentcache.engine.device import Device, Step
from agentcache.engine.output_processor import OutputProcessor
from agentcache.engine.prefix_sharing import PrefixSharing
from agentcache.engine.running_request import Outcome, RunningRequest, State
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.view import ServedModel
from agentcache.errors import EngineStopped
from agentcache.models.sampler import TokenScore
from agentcache.ranks.lost import lost_rank

# Share of a decode step's measured time to wait for grammar masks; below 1, as that includes this wait.
_OF_A_STEP = 0.8
_NOTHING_ELSE = 0.05  # seconds to wait for a mask, if idle


class Stepper:
    """The steps of the device: built, started, awaited and applied, one ahead of the device."""

    def __init__(
        self,
        device: Device,
        scheduler: Scheduler,
        admission: Admission,
        sharing: PrefixSharing,
        turns: OutputProcessor,
        cache: PrefixCache,
        counters: Counters,
        served: ServedModel,
        end: Callable[[RunningRequest, Outcome], None],
        fail: Callable[[Collection[RunningRequest], BaseException], None],
        hand_over: Callable[[], None],
    ) -> None:
        self._device = device
        self._scheduler = scheduler
        self._admission = admission
        self._sharing = sharing
        self._turns = turns
        self._cache = cache
        self._counters = counters
        self._served = served
        self._end = end
        self._fail = fail
        self._hand_over = hand_over
        self._under_way: Step | None = None
        self._holds_buffers = False  # of finished chunks
        self._late: list[LateToken] = []  # missing tokens of finished batches

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None

    def step(self) -> None:
        """Build and start the next batch, then await the previous one and apply its results.

        Results may void rows of the next batch. With a grammar, tokens are chosen after the previous ones; a row whose
        mask is late skips steps.
        """
        self._admission.admit()
        self._sharing.look()
        late = self._choose_late()
        following = self._build(self._scheduler.schedule())
        done, self._under_way = self._under_way, following
        if done is not None and following is not None and following.starts_alone:
            self._complete(done, following)
            done = None
            self._hand_over()  # replies, before a long start
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
        try:
            done.wait()
            self._note_time(done)
            self._apply(done)
        except BaseException as error:  # `following` depends on its tokens
            self._fail_steps(error, done, following)
        self.release_buffers()

    def _fail_steps(self, error: BaseException, *steps: Step | None) -> None:
        """The blocks of these steps are not published."""
        if self._served.ranks > 1:  # other ranks may have computed another part
            stop("a step has failed, and the other ranks are out of step", error)
        rows = [row for step in steps if step is not None for row in step.rows if not row.is_void]
        self._fail({row.running: None for row in rows}.keys(), error)

    def _build(self, plan: dict[RunningRequest, int]) -> Step | None:
        fitting = self._device.limit(plan)
        if plan and not fitting and self._under_way is None:
            self._admission.give_up(next(iter(plan)))
        counts = {each: self._reserve(each, count) for each, count in fitting.items()}
        # Reserving for one request may have preempted another.
        rows = [each for each, count in counts.items() if count and each.state is State.RUNNING]
        if not rows:
            return None
        try:
            return self._device.build(rows, counts[rows[0]], self._under_way, contended=self._scheduler.contended)
        except BaseException as error:
            if self._served.ranks > 1:
                stop("a step cannot be built, and the other ranks wait for it", error)
            # The remaining rows are built again in the next step, with equal writes.
            self._fail(self._device.at_fault(rows, counts[rows[0]]) or rows, error)
            return None

    def _reserve(self, running: RunningRequest, count: int) -> int:
        try:
            return self._admission.reserve(running, count)
        except BaseException as error:
            self._fail([running], error)
            return 0

    def _note_time(self, batch: Step) -> None:
        self._counters.note(batch)
        if batch.is_chunk:
            self._holds_buffers = True
            whole = batch.rows[0].work.cut == 0
            self._scheduler.token_budget.chunk_took(
                batch.seconds, batch.num_tokens, batch.context, contended=batch.contended, whole=whole
            )
        else:
            self._scheduler.token_budget.step_took(batch.seconds, contended=batch.contended)

    def release_buffers(self) -> None:
        """Free temporaries of chunks once no prompt can reuse them: GPU drivers allocate slowly."""
        if self._holds_buffers and not any(running.can_prefill for running in self._scheduler.running):
            self._holds_buffers = False
            self._device.release_buffers()

    def _apply(self, batch: Step) -> None:
        for result in batch.results():
            try:
                self._apply_row(batch, result)
            except BaseException as error:
                self._fail([result.row.running], error)

    def _apply_row(self, batch: Step, result: Result) -> None:
        running = result.row.running
        running.progress.land(batch.num_tokens)
        if running.wants_prompt_logprobs:
            self._turns.note_prompt_scores(running, result.prompt_scores)
        self._advance(running, batch.num_tokens)
        if result.token is not None and self._is_rejected(running):
            return
        if result.state is not None:
            running.apply_state(result.state)
            self._keep_state(running)
        if result.token is not None:
            self._take(running, result.token, result.score)

    def _is_rejected(self, running: RunningRequest) -> bool:
        why = None if running.num_generated else running.open_plan.verdict()
        return why is not None and self._admission.fall_back(running, why)

    def _take(self, running: RunningRequest, token: int, score: TokenScore | None) -> None:
        before = running.num_generated
        reason = self._turns.take(running, token, score)
        self._counters.generated_tokens += running.num_generated - before
        if reason is not None:
            self._end(running, reason)

    def _patience(self, batch: Step) -> float:
        """No row waits longer for masks than for its logits."""
        if len(self._scheduler.running) == 1:
            return _NOTHING_ELSE
        return max(0.0, batch.began_at + _OF_A_STEP * self._scheduler.token_budget.step_seconds - time.perf_counter())

    def _choose_late(self) -> list[LateToken]:
        self._late = [token for token in self._late if not token.row.is_void]
        ready = [token for token in self._late if not token.row.running.progress.in_flight and token.is_ready]
        return [token for token in ready if self._start_late(token)]

    def _start_late(self, token: LateToken) -> bool:
        self._late.remove(token)
        try:
            token.start()
        except BaseException as error:
            self._fail([token.row.running], error)
            return False
        return True

    def _apply_late(self, late: LateToken) -> None:
        if late.row.is_void:
            return
        running = late.row.running
        try:
            result = late.result()
            running.progress.note_late(is_late=False)
            assert result.token is not None
            if not self._is_rejected(running):
                self._take(running, result.token, result.score)
        except BaseException as error:
            self._fail([running], error)

    def _advance(self, running: RunningRequest, num_tokens: int) -> None:
        plan, start = running.open_plan, running.num_computed
        token_ids = running.token_ids[start : start + num_tokens]
        has_filled = plan.advance(token_ids, partial(self._turns.save_early, running))
        if has_filled:
            self._sharing.pass_on()
        plan.leave_windows()

    def _keep_state(self, running: RunningRequest) -> None:
        plan, num_tokens = running.open_plan.snapshots, running.num_computed
        if plan is not None and plan.wants(num_tokens) and running.progress.row_state is not None:
            slot = self._cache.checkpoints.keep(
                running.open_plan.sequence,
                num_tokens,
                lasts=num_tokens == plan.lasting,
                starts_next=num_tokens == running.submitted.repeated_tokens,
            )
            if slot is not None:
                self._device.keep_state(slot, running.progress.row_state)


def stop(why: str, error: BaseException) -> NoReturn:
    lost = lost_rank(error)
    if lost is not None:
        raise lost
    if isinstance(error, EngineStopped):
        raise error
    raise EngineStopped(f"{why}: {error}") from error
