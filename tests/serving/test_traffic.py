"""Time is shared: the scheduler, the pace and admission under whole loads, on a device that is only a formula."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.api.request import Priority
from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.snapshots import ROW_STATES
from agentcache.engine.token_budget import PATIENCE, SMALLEST_CHUNK
from tests.examples import examples
from tests.serving.simulation import MAX_STALL, Client, Costs, Simulation, cached_of

INTERACTIVE, BACKGROUND = Priority.INTERACTIVE, Priority.BACKGROUND


def run_staggered(simulation: Simulation, *, prompt: int = 16_384, decoders: int = 3) -> tuple[list[Client], Client]:
    """Some that generate for long, and then a long prompt beside them."""
    talkers = [simulation.submit(100, 10**6) for _ in range(decoders)]
    simulation.run(2.0)
    simulation.decoding_seconds = simulation.prefilling_seconds = 0.0  # their own prompts are another matter
    long = simulation.submit(prompt, 1)
    while long.done_at is None:
        simulation.step()
    return talkers, long


MACHINES = st.builds(
    Costs,
    step=st.floats(0.001, 0.2),
    step_row=st.floats(0, 0.01),
    chunk=st.floats(0, 0.03),
    chunk_token=st.floats(1e-4, 3e-3),
    chunk_token_context=st.floats(0, 3e-7),
)


@settings(max_examples=examples(15))
@given(costs=MACHINES, decode_share=st.sampled_from([0.3, 0.5, 0.7]))
def test_a_long_prompt_keeps_nobody_waiting_longer_than_a_stall(costs: Costs, decode_share: float) -> None:
    simulation = Simulation(costs=costs, decode_share=decode_share)
    talkers, long = run_staggered(simulation, prompt=4000)
    step = costs.decode(len(talkers))
    most = 1.5 * MAX_STALL + step
    smallest = max(costs.prefill(SMALLEST_CHUNK, context) for context in (0, 4000)) + step
    for client in talkers:
        gaps = sorted(client.gaps)
        assert gaps[int(len(gaps) * 0.95)] <= max(most, smallest) + 1e-9
    # A short prompt may go before its turn; what it owes then is paid when it is done.
    ratio, patience = decode_share / (1 - decode_share), PATIENCE * MAX_STALL
    may_be_short = simulation.prefilling_seconds < 1.5 * patience  # by what was measured when it came
    decoding = simulation.decoding_seconds + (max(most, smallest) + (patience if may_be_short else 0)) * ratio
    assert decoding >= decode_share * (decoding + simulation.prefilling_seconds)
    assert long.done_at is not None


def test_decoding_goes_at_half_its_rate_beside_a_16k_prompt() -> None:
    simulation = Simulation()
    talkers, long = run_staggered(simulation)
    assert long.done_at is not None
    before = [t for t in talkers[0].token_times if 0.5 < t < 2]
    during = [t for t in talkers[0].token_times if long.arrived_at < t < long.done_at]
    rate = len(during) / (long.done_at - long.arrived_at) / (len(before) / 1.5)
    assert 0.45 < rate < 0.6
    assert simulation.lookahead_rows > 0.9 * len(during)


@pytest.mark.parametrize(
    ("prompt", "wanted", "decoders", "most"),
    [(1, 16, 3, 1.5), (64, 16, 3, 1.5), (400, 40, 3, 1.5), (400, 40, 0, 2.5)],  # while nobody decodes, chunks are long
)
def test_a_short_request_beside_a_16k_prompt_takes_about_twice_as_long_as_alone(
    prompt: int, wanted: int, decoders: int, most: float
) -> None:
    def run(decoders: int, *, long_prompt: bool, delay: float = 0.0) -> float:
        simulation = Simulation()
        for _ in range(decoders):
            simulation.submit(100, 10**6)
        simulation.run(1.0 if decoders else 0)
        long = simulation.submit(16_384, 1) if long_prompt else None
        simulation.run(1.0 + delay)
        short = simulation.submit(prompt, wanted)
        while short.done_at is None:
            simulation.step()
        assert long is None or long.done_at is None
        return short.done_at - short.arrived_at

    during = [run(decoders, long_prompt=True, delay=number * 0.037) for number in range(9)]
    assert statistics.median(during) < most * run(decoders, long_prompt=False)
    assert statistics.median(during) < max(most, 2.1) * run(0, long_prompt=False)


def test_the_second_token_beside_a_long_prompt_does_not_wait_longer_than_a_stall() -> None:
    """With nobody else there, the chunk behind the end of its own prompt was as long as if nobody decoded."""
    simulation = Simulation()
    simulation.submit(16_384, 1)
    simulation.run(1.0)
    short = simulation.submit(64, 16)
    while short.done_at is None:
        simulation.step()
    assert max(short.gaps) < 1.2 * MAX_STALL + simulation.costs.decode(1)


def test_prompts_that_arrive_together_do_not_wait_for_the_first_answers_of_each_other() -> None:
    """All of them are waited for; that one has begun to answer is no reason to let the next one wait."""
    simulation = Simulation(costs=Costs(step=0.03, step_row=0.01, chunk=0.02, chunk_token=0.004))
    together = [simulation.submit(300, 60) for _ in range(3)]
    simulation.run()
    firsts = sorted(client.token_times[0] for client in together)
    prefilled = 3 * (simulation.costs.prefill(300, 0) + 20 * simulation.costs.chunk)  # in chunks of a stall
    assert firsts[-1] < 2 * prefilled


def test_short_prompts_do_not_wait_for_first_answers_behind_an_overdue_long_one() -> None:
    simulation = Simulation(costs=Costs(step=0.06, chunk=0.02, chunk_token=0.002))
    simulation.submit(100_000, 1)
    simulation.run(0.5)
    simulation.run(20.0, [(number * 0.7, partial(simulation.submit, 64, 20)) for number in range(1, 28)])
    waits = sorted(c.token_times[0] - c.arrived_at for c in simulation.clients.values() if c.token_times)
    assert waits[-1] < 1.0


def test_endless_first_tokens_leave_a_long_prompt_its_share() -> None:
    simulation = Simulation()
    long = simulation.submit(100_000, 1)
    simulation.run(1.0)
    simulation.decoding_seconds = simulation.prefilling_seconds = 0.0
    simulation.run(10.0, [(number * 0.1, partial(simulation.submit, 1, 20)) for number in range(100)])
    total = simulation.decoding_seconds + simulation.prefilling_seconds
    assert long.done_at is None
    assert simulation.prefilling_seconds >= 0.4 * total, "all but what it is patient for"


@pytest.mark.parametrize("step", [0.01, 0.04])
def test_short_turns_that_end_together_leave_a_long_prompt_its_share(step: float) -> None:
    """Between two turns nobody decodes for a moment; what was lent until then is not forgotten for that."""
    simulation = Simulation(costs=Costs(step=step))
    long = simulation.submit(200_000, 1)
    simulation.run(1.0)
    simulation.decoding_seconds = 0.0
    agents, begun = [simulation.submit(64, 30) for _ in range(2)], simulation.now
    while simulation.now < begun + 30:
        simulation.step()
        agents = [simulation.submit(64, 30) if agent.done_at is not None else agent for agent in agents]
    assert long.done_at is None
    assert simulation.decoding_seconds < 0.6 * 30


def test_what_first_tokens_took_is_given_back() -> None:
    """Over a longer time decoding has its share, no less and not much more."""
    simulation = Simulation()
    for _ in range(3):
        simulation.submit(100, 10**6)
    simulation.run(1.0)
    simulation.submit(100_000, 1)
    simulation.run(1.0)
    simulation.decoding_seconds = simulation.prefilling_seconds = 0.0
    simulation.run(30.0, [(number * 2.0, partial(simulation.submit, 1, 30)) for number in range(15)])
    total = simulation.decoding_seconds + simulation.prefilling_seconds
    assert 0.49 <= simulation.decoding_seconds / total <= 0.56


def test_a_prompt_of_one_chunk_waits_for_no_more_than_the_chunk_under_way() -> None:
    simulation = Simulation()
    for _ in range(3):
        simulation.submit(100, 10**6)
    simulation.run(1.0)
    simulation.submit(16_384, 1)
    simulation.run(1.0)
    waits = []
    for number in range(20):
        simulation.run(0.31 + number * 0.01)
        short = simulation.submit(64, 2)
        while not short.token_times:
            simulation.step()
        waits.append(short.token_times[0] - short.arrived_at)
    own, step = simulation.costs.prefill(64, 0), simulation.costs.decode(4)
    assert max(waits) <= 1.2 * MAX_STALL + step + own


def test_endless_prompts_of_one_chunk_leave_decoding_its_share() -> None:
    simulation = Simulation()
    for _ in range(3):
        simulation.submit(100, 10**6)
    simulation.run(1.0)
    simulation.decoding_seconds = simulation.prefilling_seconds = 0.0
    simulation.run(10.0, [(number * 0.02, partial(simulation.submit, 64, 1)) for number in range(500)])
    total = simulation.decoding_seconds + simulation.prefilling_seconds
    assert simulation.decoding_seconds >= 0.45 * total


def test_prompts_take_turns_the_shortest_first() -> None:
    simulation = Simulation()
    long, short = simulation.submit(16_384, 1), simulation.submit(300, 1)
    simulation.run()
    assert short.done_at is not None and long.done_at is not None
    assert short.done_at < 0.1 * long.done_at


@pytest.mark.parametrize("priority", [INTERACTIVE, BACKGROUND])
@pytest.mark.parametrize("every", [0.08, 0.25])  # more than the machine can do, and less
def test_a_long_prompt_gets_on_under_endless_short_ones(priority: Priority, every: float) -> None:
    simulation = Simulation()
    long = simulation.submit(4096, 1, priority)
    alone = simulation.costs.prefill(4096, 2048)
    shorts = [(number * every, partial(simulation.submit, 200, 5)) for number in range(int(10 * alone / every))]
    simulation.run(10 * alone, shorts)
    assert long.done_at is not None
    waits = [c.token_times[0] - c.arrived_at for c in simulation.clients.values() if c is not long and c.token_times]
    assert every < 0.1 or statistics.median(waits) < 0.5


@settings(max_examples=examples(30))
@given(
    costs=MACHINES,
    every=st.floats(0.05, 0.5),
    small=st.integers(2, 400),
    wanted=st.integers(1, 20),
    max_running=st.sampled_from([2, 4, 16]),
    priority=st.sampled_from(Priority),
)
def test_a_prompt_that_needs_nearly_all_blocks_starts_and_gets_on_under_endless_small_ones(
    costs: Costs, every: float, small: int, wanted: int, max_running: int, priority: Priority
) -> None:
    """Of later requests, no more than three chunks and one of each prompt beside it go before each of its chunks.

    A background one lets eight requests be admitted, and eight chunks be computed, before it is like any other.
    """
    simulation = Simulation(num_blocks=12, max_running=max_running, costs=costs)
    submit = partial(simulation.submit, small, wanted)
    simulation.run(3 * every + 0.01, [(number * every, submit) for number in range(4)])
    large = simulation.submit(9 * BLOCK_SIZE - 20, 1, priority)
    chunks = simulation.watch_chunks()
    while large.done_at is None:
        assert simulation.now < 500, "it has not begun to answer"
        simulation.run(every, [(simulation.now, submit)])
    later = [client for client in chunks if client.arrived_at >= large.arrived_at]
    own = [-1, *(index for index, client in enumerate(later) if client is large)]
    if priority is BACKGROUND:
        assert len(set(later[: own[1]])) <= 16 + max_running
    else:
        assert max(after - before for before, after in pairwise(own)) <= 3 + max_running


def test_small_requests_hardly_wait_longer_beside_a_prompt_that_needs_nearly_all_blocks() -> None:
    def waits(*, beside: bool) -> list[float]:
        simulation = Simulation(num_blocks=72)
        large = simulation.submit(70 * BLOCK_SIZE - 300, 1) if beside else None
        simulation.run(30.0, [(number * 0.25, partial(simulation.submit, 64, 20)) for number in range(120)])
        assert large is None or large.done_at is None
        clients = [client for client in simulation.clients.values() if client is not large and client.token_times]
        return sorted(client.token_times[0] - client.arrived_at for client in clients)

    quiet, busy = waits(beside=False), waits(beside=True)
    assert busy[int(0.95 * len(busy))] < quiet[int(0.95 * len(quiet))] + 1.2 * MAX_STALL


def test_an_interactive_request_goes_before_background_prompts() -> None:
    simulation = Simulation()
    warms = [simulation.submit(4000, 1, BACKGROUND) for _ in range(6)]
    simulation.run(0.5)
    question = simulation.submit(600, 10)
    simulation.run()
    finished = sorted(simulation.clients.values(), key=lambda client: client.done_at or 0)
    assert finished.index(simulation.clients[question.generation]) <= 1
    assert all(warm.done_at for warm in warms)


# -- traffic ----------------------------------------------------------------------------------------------------------


REQUESTS = st.tuples(
    st.sampled_from([1, 2, 40, 255, 256, 257, 700, 2000]),  # prompt tokens
    st.integers(1, 60),  # tokens wanted
    st.sampled_from(Priority),
    st.integers(0, 3),  # token: prompts of the same one share blocks
    st.floats(0, 3),  # arrival
    st.sampled_from([None, None, None, 0.1, 1.0]),  # cancelled after
)


@settings(max_examples=examples(40))
@given(
    requests=st.lists(REQUESTS, max_size=25),
    num_blocks=st.sampled_from([9, 14, 40, 1000]),
    max_running=st.sampled_from([1, 2, 4, 16]),
    costs=MACHINES,
    num_states=st.sampled_from([0, 0, 5, 8, 30]),
)
def test_in_any_traffic_everybody_gets_done_and_no_block_is_lost(
    requests: list[tuple[int, int, Priority, int, float, float | None]],
    num_blocks: int,
    max_running: int,
    costs: Costs,
    num_states: int,
) -> None:
    """Cancels included; the RAM budget is part of the cache's integrity, and each row's recurrent state its own."""
    simulation = Simulation(
        num_blocks=num_blocks, max_running=max_running, costs=costs, check_integrity=True, num_states=num_states
    )
    gone: set[int] = set()

    def arrive(number: int) -> None:
        prompt, wanted, priority, token, _, _ = requests[number]
        client = simulation.submit(prompt, wanted, priority, token)
        submitted = client.generation.submitted
        client.generation.submitted = replace(submitted, submitted_at=submitted.submitted_at + number * 1e-9)
        clients[number] = client

    def cancel(number: int) -> None:
        client = clients[number]
        if client.done_at is None and client.failed is None:
            simulation.cancel(client)
            gone.add(number)

    clients: dict[int, Client] = {}
    events = [(request[4], partial(arrive, number)) for number, request in enumerate(requests)]
    events += [(r[4] + r[5], partial(cancel, number)) for number, r in enumerate(requests) if r[5] is not None]
    simulation.run(arrivals=events)
    assert not simulation.has_work
    for number, client in clients.items():
        assert client.failed is None
        assert number in gone or len(client.token_times) == client.wanted
    assert simulation.cache.count_blocks().live == 0


def test_equal_prompts_that_end_with_a_block_are_both_answered() -> None:
    """The second one takes over what the first has computed, but for the block whose last token chooses its own."""
    simulation = Simulation()
    clients = [simulation.submit(2 * BLOCK_SIZE, 3, token=1) for _ in range(2)]
    simulation.run()
    assert [len(client.token_times) for client in clients] == [3, 3]


def test_a_snapshot_makes_room_as_soon_as_the_request_that_began_from_it_runs() -> None:
    """Room for two rows and nothing else: the third request need not wait for the answer of the first."""
    simulation = Simulation(num_states=2 * ROW_STATES, check_integrity=True)
    simulation.submit(512, 1, token=1)
    simulation.run()
    first, second = simulation.submit(513, 200, token=1), simulation.submit(300, 2, token=2)
    simulation.run()
    assert cached_of(first.generation).shared == 512
    assert second.done_at is not None and first.done_at is not None and second.done_at < first.done_at


def test_the_state_behind_a_system_prompt_outlives_those_within_a_conversation() -> None:
    """With room for few states, another conversation of the same system prompt still begins behind it."""
    simulation = Simulation(num_states=ROW_STATES + 3)
    simulation.submit(3000, 1, token=1, system_tokens=512)
    simulation.run()
    other = simulation.submit(600, 1, token=1)
    simulation.run()
    assert cached_of(other.generation).shared == 512


@pytest.mark.parametrize("num_running", [2, 3, 4])
def test_prompts_that_do_not_fit_together_get_done_one_after_the_other(num_running: int) -> None:
    simulation = Simulation(num_blocks=10, max_running=num_running)
    clients = [simulation.submit(8 * BLOCK_SIZE, 1) for _ in range(4)]
    for number, client in enumerate(clients):
        client.generation.submitted = replace(client.generation.submitted, submitted_at=number)
    simulation.run()
    assert sorted(clients, key=lambda client: client.done_at or 0) == clients
    assert simulation.scheduler.preemptions == 0, "they are admitted when there is room"


def test_those_who_outgrow_the_blocks_are_preempted_and_get_done() -> None:
    simulation = Simulation(num_blocks=8, max_running=4)
    clients = [simulation.submit(200, 500) for _ in range(4)]
    simulation.run()
    assert simulation.scheduler.preemptions > 0
    assert [len(client.token_times) for client in clients] == [500] * 4


def test_a_prompt_that_never_fits_is_refused() -> None:
    simulation = Simulation(num_blocks=4)
    client = simulation.submit(5 * BLOCK_SIZE, 1)
    simulation.run()
    assert client.failed is not None
    assert not simulation.has_work
