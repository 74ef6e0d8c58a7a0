"""The step plan: chunks, turns, who is admitted and who gives way."""

from __future__ import annotations

from array import array

import pytest

from agentcache.api.request import Priority, Request, TokenPrompt
from agentcache.api.sampling import SamplingParams
from agentcache.blocks.block_tables import BlockTables
from agentcache.engine.running_request import Requests, RunningRequest, State
from agentcache.engine.scheduler import Scheduler
from agentcache.engine.token_budget import SMALLEST_CHUNK, TokenBudget
from tests.serving.simulation import MAX_STALL, make_generation, take_plan

INTERACTIVE, BACKGROUND = Priority.INTERACTIVE, Priority.BACKGROUND


def make_scheduler(max_running: int = 4, chunk: int = 256, tokens_per_second: float = 1e6) -> Scheduler:
    token_budget = TokenBudget(max_stall=MAX_STALL, decode_share=0.5, chunk=chunk, idle_chunk=1024, token_seconds=1.0)
    token_budget.chunk_took(100 / tokens_per_second, 100, 0, contended=False)
    return Scheduler(Requests(), max_running=max_running, token_budget=token_budget)


def admit(scheduler: Scheduler, generation: RunningRequest, cached: int = 0) -> RunningRequest:
    take_plan(generation, BlockTables("root", None, array("I", generation.token_ids[:cached]), [], []))
    scheduler._requests.move(generation, State.WAITING)
    scheduler.admit(generation, loading=False)
    return generation


def decoding(scheduler: Scheduler) -> RunningRequest:
    """A generation that has been writing for a while and wants much more."""
    generation = make_generation(10, wanted=1000)
    generation.token_ids += [1] * 100
    return admit(scheduler, generation, cached=109)


# -- one plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "tokens_per_second", "expected"),
    [
        (0, 2600, 256),
        (100, 2600, 156),  # to the block's end
        (0, 2000, 128),  # two equal parts rather than 200 and 56
        (0, 1000, 86),
        (200, 1000, 56),
        (300, 1000, 71),
        (0, 10, SMALLEST_CHUNK),
    ],
)
def test_chunks_end_where_blocks_do_and_are_of_a_size(cached: int, tokens_per_second: float, expected: int) -> None:
    scheduler = make_scheduler(tokens_per_second=tokens_per_second)
    decoding(scheduler)
    prompt = admit(scheduler, make_generation(2000), cached)
    scheduler.token_budget.chunk_took(100 / tokens_per_second, 100, cached, contended=False)
    assert scheduler.schedule() == {prompt: expected}


@pytest.mark.parametrize(("num_tokens", "expected"), [(2000, 1024), (1000, 1000), (1024, 1024), (1025, 1024)])
def test_with_nobody_decoding_chunks_are_large(num_tokens: int, expected: int) -> None:
    scheduler = make_scheduler()
    prompt = admit(scheduler, make_generation(num_tokens))
    assert scheduler.schedule() == {prompt: expected}


@pytest.mark.parametrize(("wanted", "priority", "expected"), [(2, None, 0), (1, None, 1024), (2, "background", 128)])
def test_a_chunk_behind_the_end_of_a_prompt_waits_for_its_second_token(
    wanted: int, priority: str | None, expected: int
) -> None:
    """But not for a background answer's. A stall has 200 tokens."""
    scheduler = make_scheduler(tokens_per_second=2000)
    scheduler.token_budget.step_took(0.01)
    kind = None if priority is None else Priority(priority)
    short = admit(scheduler, make_generation(64, wanted=wanted, priority=kind))
    assert scheduler.schedule() == {short: 64}
    short.progress.in_flight = 64
    long = admit(scheduler, make_generation(20_000, priority=kind))
    assert scheduler.schedule() == ({long: expected} if expected else {})


def test_a_short_prompt_does_not_wait_for_the_second_token_of_another() -> None:
    scheduler = make_scheduler(tokens_per_second=2000)
    scheduler.token_budget.step_took(0.01)
    first, second = (admit(scheduler, make_generation(64, wanted=2)) for _ in range(2))
    assert scheduler.schedule() == {first: 64}
    first.progress.in_flight = 64
    assert scheduler.schedule() == {second: 64}


def test_a_step_is_a_decode_batch_or_one_chunk() -> None:
    scheduler = make_scheduler()
    rows = [decoding(scheduler), decoding(scheduler)]
    prompts = [admit(scheduler, make_generation(2000)) for _ in range(2)]
    plans = [scheduler.schedule() for _ in range(4)]
    assert plans[1] == plans[3] == dict.fromkeys(rows, 1)
    assert [list(plan) for plan in (plans[0], plans[2])] == [[prompts[0]], [prompts[0]]]


def test_rows_go_on_from_the_token_under_way() -> None:
    scheduler = make_scheduler()
    row = decoding(scheduler)
    row.progress.in_flight = 1
    assert scheduler.schedule() == {row: 1}


def test_nobody_goes_on_from_the_first_or_behind_the_last_token() -> None:
    """The first is to be shown at once; behind the last nothing is wanted."""
    scheduler = make_scheduler()
    first = admit(scheduler, make_generation(10, wanted=5), cached=9)
    assert scheduler.schedule() == {first: 1}
    first.progress.in_flight = 1
    assert scheduler.schedule() == {}
    last = make_generation(10, wanted=2)
    last.token_ids.append(1)
    admit(scheduler, last, cached=10)
    assert scheduler.schedule() == {last: 1}
    last.progress.in_flight = 1
    assert scheduler.schedule() == {}


def test_a_prompt_waits_for_its_chunk_under_way() -> None:
    scheduler = make_scheduler()
    prompt, other = (admit(scheduler, make_generation(2000)) for _ in range(2))
    prompt.progress.in_flight = 256
    assert list(scheduler.schedule()) == [other]


def test_first_tokens_go_before_a_long_prompt_but_not_where_a_short_one_waits_behind_it() -> None:
    scheduler = make_scheduler(tokens_per_second=500)
    scheduler.token_budget.step_took(0.05)
    beginner = make_generation(10, wanted=100)
    beginner.token_ids.append(1)
    admit(scheduler, beginner, cached=10)
    long = admit(scheduler, make_generation(2000))
    long.progress.passed_over = 3  # it is next, whoever else comes
    assert scheduler.schedule() == {beginner: 1}
    assert scheduler.contended
    warm = admit(scheduler, make_generation(64, priority=BACKGROUND))
    assert scheduler.schedule() == {beginner: 1}, "what is done in the background can wait"
    scheduler._requests.move(warm, State.FAILED)
    admit(scheduler, make_generation(64))
    assert list(scheduler.schedule()) == [long]


# -- who is admitted --------------------------------------------------------------------------------------------------


def queued(scheduler: Scheduler, submitted_at: float, priority: Priority = INTERACTIVE) -> RunningRequest:
    generation = make_generation(10, submitted_at=submitted_at, priority=priority)
    scheduler._requests.move(generation, State.WAITING)
    return generation


def test_first_come_first_served_but_interactive_before_background() -> None:
    scheduler = make_scheduler(max_running=10)
    warm, second, first = queued(scheduler, 0, BACKGROUND), queued(scheduler, 2), queued(scheduler, 1)
    order = []
    while (generation := scheduler.next_to_admit()) is not None:
        scheduler.admit(generation, loading=False)
        order.append(generation)
    assert order == [first, second, warm]


def test_background_leaves_a_place_free() -> None:
    scheduler = make_scheduler(max_running=2)
    warms = [queued(scheduler, number, BACKGROUND) for number in range(2)]
    scheduler.admit(warms[0], loading=True)
    assert scheduler.next_to_admit() is None
    late = queued(scheduler, 5)
    assert scheduler.next_to_admit() is late
    alone = make_scheduler(max_running=1)
    assert queued(alone, 0, BACKGROUND) is alone.next_to_admit()


def test_a_background_request_that_was_passed_over_often_is_like_any_other() -> None:
    scheduler = make_scheduler(max_running=100)
    warm = queued(scheduler, 0, BACKGROUND)
    for number in range(1, 50):
        queued(scheduler, number)
        admitted = scheduler.next_to_admit()
        assert admitted is not None
        scheduler.admit(admitted, loading=False)
        if admitted is warm:
            break
    assert 5 < number < 15


def test_a_warm_is_background_unless_it_says_otherwise() -> None:
    def request(max_tokens: int | None, priority: Priority | None) -> Request:
        return Request("r", TokenPrompt([1]), SamplingParams(max_tokens=max_tokens), priority=priority)

    assert request(0, None).is_background
    assert not request(0, INTERACTIVE).is_background
    assert not request(None, None).is_background
    assert request(5, BACKGROUND).is_background


def test_victims_are_background_then_young_and_come_back_to_their_place() -> None:
    scheduler = make_scheduler(max_running=10)
    old, young = make_generation(10, submitted_at=1), make_generation(10, submitted_at=3)
    warm = make_generation(10, submitted_at=0, priority=BACKGROUND)
    for generation in (old, warm, young):
        admit(scheduler, generation)
    queued(scheduler, 7)
    for victim in (warm, young):
        assert scheduler.victim() is victim
        scheduler.preempt(victim)
    assert scheduler.victim() is None, "the oldest gets done"
    assert scheduler.next_to_admit() is warm
    assert scheduler.preemptions == 2


def test_a_preempted_request_does_not_wait_for_what_the_device_computed_for_it() -> None:
    """That result is void: the request is computed again as soon as it is admitted."""
    scheduler = make_scheduler()
    row = decoding(scheduler)
    row.progress.in_flight = 1
    row.open_plan.tables = ()  # they are in no cache
    row.open_plan.abandon()
    row.progress.reset()
    scheduler.preempt(row)
    take_plan(row, BlockTables("root", None, array("I", row.token_ids[:50]), [], []))
    scheduler.admit(row, loading=False)
    assert scheduler.schedule() == {row: 60}


def test_who_is_admitted_has_been_passed_over_by_nobody() -> None:
    waiting = make_generation(10)
    waiting.progress.passed_over = 99
    assert admit(make_scheduler(), waiting).progress.passed_over == 0
