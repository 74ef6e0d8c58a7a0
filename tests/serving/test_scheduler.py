"""The step plan, and that everybody gets done."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.prefix_cache import PrefixCache, Sequence
from agentcache.blocks.prefix_match import Match, PromptMatch, Transcript
from agentcache.errors import OutOfBlocks
from agentcache.models.detokenizer import Detokenizer
from agentcache.serving.generation import Generation
from agentcache.serving.output import Output
from agentcache.serving.request import Request, TokenPrompt
from agentcache.serving.scheduler import Scheduler

CHUNK = 300
IDLE_CHUNK = 1000


def make_generation(num_tokens: int, token: int = 1, submitted_at: float = 0.0) -> Generation:
    ids = array("I", [token] * num_tokens)
    transcript = Transcript("a" * num_tokens, ids, array("I", range(1, num_tokens + 1)), (("prompt", num_tokens),))
    return Generation(
        request=Request("r", TokenPrompt(list(ids))),
        match=PromptMatch(Match.NEW, transcript, 0),
        max_tokens=1,
        output=Output(Detokenizer(lambda token: b"", set())),
        emit=lambda update: None,
        submitted_at=submitted_at,
    )


def admit(scheduler: Scheduler, cached: int = 0) -> Generation:
    generation = scheduler.waiting.popleft()
    generation.sequence = Sequence("root", generation.token_ids[:cached], [], [])
    scheduler.running.append(generation)
    return generation


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are admitted, computed by the plan, generate, end, are cancelled and preempted."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(max_running=4, prefill_chunk=CHUNK, idle_prefill_chunk=IDLE_CHUNK)
        self.all: list[Generation] = []
        self.passed_over: dict[Generation, int] = {}

    @rule(num_tokens=st.sampled_from([1, 2, 255, 256, 257, 900, 5000]))
    def add(self, num_tokens: int) -> None:
        generation = make_generation(num_tokens, submitted_at=len(self.all))
        self.scheduler.add(generation)
        self.all.append(generation)

    @precondition(lambda self: self.scheduler.waiting and self.scheduler.can_admit)
    @rule(share=st.floats(0, 0.99))
    def admit(self, share: float) -> None:
        first = self.scheduler.waiting[0]
        cached = min(int(share * len(first.token_ids)), len(first.token_ids) - 1)
        self.passed_over[admit(self.scheduler, cached)] = 0

    @rule(generates=st.lists(st.booleans(), min_size=4, max_size=4))
    def step(self, generates: list[bool]) -> None:
        before = list(self.scheduler.running)
        plan = self.scheduler.schedule()
        assert sorted(map(id, self.scheduler.running)) == sorted(map(id, before))
        assert bool(plan) is bool(before)
        self.check_plan(plan, before)
        for (generation, num_tokens), goes_on in zip(plan.items(), generates, strict=False):
            self.compute(generation, num_tokens, goes_on)

    def check_plan(self, plan: dict[Generation, int], running: list[Generation]) -> None:
        decoding = [g for g in running if g.num_to_compute == 1]
        prompts = [g for g in running if g.num_to_compute > 1]
        advanced = [g for g in prompts if g in plan]
        assert len(advanced) == min(1, len(prompts))
        assert all(plan[g] == 1 for g in decoding)
        for generation in advanced:
            self.check_chunk(generation, plan[generation], CHUNK if decoding else IDLE_CHUNK)
        for generation in prompts:
            self.passed_over[generation] = 0 if generation in plan else self.passed_over[generation] + 1
            assert self.passed_over[generation] < 4, "prompts take turns"

    @staticmethod
    def check_chunk(generation: Generation, num_tokens: int, chunk: int) -> None:
        assert 0 < num_tokens <= chunk
        end = generation.num_computed + num_tokens
        assert end <= len(generation.token_ids)
        assert end == len(generation.token_ids) or end % BLOCK_SIZE == 0

    def compute(self, generation: Generation, num_tokens: int, goes_on: bool) -> None:
        assert generation.sequence is not None
        generation.sequence.token_ids.extend([1] * num_tokens)
        if generation.num_to_compute:
            return
        if goes_on:
            generation.token_ids.append(1)
        else:
            self.forget(generation)

    def forget(self, generation: Generation) -> None:
        self.scheduler.remove(generation)
        self.all.remove(generation)

    @precondition(lambda self: self.all)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        self.forget(self.all[which % len(self.all)])

    @rule()
    def preempt(self) -> None:
        running = self.scheduler.running
        victim = self.scheduler.youngest()
        assert (victim is None) is (len(running) < 2)
        if victim is not None:
            assert all(victim.submitted_at >= other.submitted_at for other in running)
            self.scheduler.preempt(victim)
            victim.sequence = None
            assert self.scheduler.waiting[0] is victim

    @invariant()
    def agrees(self) -> None:
        scheduler = self.scheduler
        assert sorted(map(id, scheduler)) == sorted(map(id, self.all))
        assert len(scheduler.running) <= 4
        assert scheduler.can_admit is (len(scheduler.running) < 4)
        assert scheduler.has_work is bool(scheduler.running or (scheduler.waiting and scheduler.can_admit))


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(
    ("cached", "chunk", "expected"), [(0, 256, 256), (100, 256, 156), (0, 100, 100), (200, 100, 56)]
)
def test_a_chunk_ends_on_a_block_boundary_where_it_reaches_one(cached: int, chunk: int, expected: int) -> None:
    scheduler = Scheduler(max_running=1, prefill_chunk=chunk, idle_prefill_chunk=0)
    scheduler.add(make_generation(2000))
    generation = admit(scheduler, cached)
    assert scheduler.schedule() == {generation: expected}


def test_prompts_take_turns_and_hold_up_nobody_who_decodes() -> None:
    scheduler = Scheduler(max_running=4, prefill_chunk=256, idle_prefill_chunk=512)
    for num_tokens in (2000, 1, 2000, 2000):
        scheduler.add(make_generation(num_tokens))
    first, decoding, second, third = [admit(scheduler) for _ in range(4)]
    plans = [scheduler.schedule() for _ in range(6)]
    assert [plan.keys() - {decoding} for plan in plans] == [{first}, {second}, {third}] * 2
    assert all(plan[decoding] == 1 for plan in plans)


def test_loading_requests_take_a_place() -> None:
    scheduler = Scheduler(max_running=1, prefill_chunk=256, idle_prefill_chunk=256)
    scheduler.loading.append(make_generation(1))
    assert not scheduler.can_admit
    scheduler.remove(scheduler.loading[0])
    assert scheduler.can_admit


@dataclass(frozen=True)
class FullGroup:
    name: str = "full.0"
    window: int | None = None
    bytes_per_block: int = 1

    def first_block_needed(self, num_tokens: int) -> int:
        return 0


class SmallEngine:
    """The engine's way with scheduler and cache, without a model: each request ends when its prompt is computed."""

    def __init__(self, num_blocks: int, num_running: int) -> None:
        self.cache = PrefixCache([FullGroup()], num_blocks)
        self.scheduler = Scheduler(max_running=num_running, prefill_chunk=256, idle_prefill_chunk=512)
        self.done: list[Generation] = []

    def step(self) -> None:
        while self.scheduler.waiting and self.scheduler.can_admit:
            generation = self.scheduler.waiting[0]
            prefix = self.cache.match_prefix("root", generation.token_ids, len(generation.token_ids) - 1)
            try:
                generation.sequence = self.cache.open("root", prefix)
            except OutOfBlocks:
                break
            self.scheduler.running.append(self.scheduler.waiting.popleft())
        for generation, num_tokens in self.scheduler.schedule().items():
            if self.reserve(generation, num_tokens):
                self.compute(generation, num_tokens)
        self.cache.check_integrity()

    def reserve(self, generation: Generation, num_tokens: int) -> bool:
        while generation in self.scheduler.running:
            assert generation.sequence is not None
            try:
                self.cache.reserve(generation.sequence, num_tokens)
                return True
            except OutOfBlocks:
                victim = self.scheduler.youngest()
                assert victim is not None, "one alone has room enough"
                assert victim.sequence is not None
                self.cache.abandon(victim.sequence)
                victim.sequence = None
                self.scheduler.preempt(victim)
        return False

    def compute(self, generation: Generation, num_tokens: int) -> None:
        sequence = generation.sequence
        assert sequence is not None
        start = sequence.num_tokens
        self.cache.advance(sequence, generation.token_ids[start : start + num_tokens])
        if not generation.num_to_compute:
            self.cache.close(sequence)
            self.scheduler.remove(generation)
            self.done.append(generation)


@pytest.mark.parametrize("num_running", [2, 3, 4])
def test_prompts_that_do_not_fit_together_get_done_one_after_the_other(num_running: int) -> None:
    engine = SmallEngine(num_blocks=10, num_running=num_running)
    generations = [make_generation(8 * BLOCK_SIZE, token, submitted_at=token) for token in range(4)]
    for generation in generations:
        engine.scheduler.add(generation)
    for _ in range(400):
        engine.step()
    assert sorted(map(id, engine.done)) == sorted(map(id, generations))
    assert engine.done[0] is generations[0]
