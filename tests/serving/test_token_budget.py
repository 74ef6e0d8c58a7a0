"""How large chunks get, and when decoding has had its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.engine.token_budget import SMALLEST_CHUNK, TokenBudget, idle_chunk

MAX_STALL = 0.1


def make_token_budget(
    *, max_stall: float = 0.1, decode_share: float = 0.5, chunk: int = 256, token_seconds: float = 1.0
) -> TokenBudget:
    return TokenBudget(
        max_stall=max_stall, decode_share=decode_share, chunk=chunk, idle_chunk=512, token_seconds=token_seconds
    )


def measured(tokens_per_second: float, context: int = 0, **options: float) -> TokenBudget:
    token_budget = make_token_budget(**options)
    token_budget.chunk_took(256 / tokens_per_second, 256, context, contended=False)
    return token_budget


def test_before_anything_is_measured_chunks_are_small() -> None:
    assert make_token_budget().chunk_tokens(0, contended=True) == SMALLEST_CHUNK


@pytest.mark.parametrize(
    ("tokens_per_second", "tokens"), [(10, 32), (1000, 100), (2000, 200), (3000, 256), (10**6, 256)]
)
def test_a_chunk_takes_a_stall_while_anyone_decodes(tokens_per_second: float, tokens: int) -> None:
    assert measured(tokens_per_second).chunk_tokens(0, contended=True) == pytest.approx(tokens, abs=1)


@given(st.lists(st.tuples(st.floats(1e-6, 10), st.integers(0, 30_000))), st.integers(0, 30_000))
def test_while_nobody_decodes_the_pace_of_the_machine_cuts_no_prompt(
    chunks: list[tuple[float, int]], context: int
) -> None:
    """The last digits of results depend on the cuts: a slow server and a fast one compute the same."""
    token_budget = make_token_budget()
    for seconds, behind in chunks:
        token_budget.chunk_took(seconds, 256, behind, contended=False)
    assert token_budget.chunk_tokens(context, contended=False) == 512


@pytest.mark.parametrize(
    ("chunk", "token_seconds", "idle"),
    [(256, 1e-9, 2048), (256, 1e-4, 2048), (256, 4e-4, 512), (256, 1e-2, 256), (100, 1e-3, 400), (4096, 1e-9, 4096)],
)
def test_an_idle_chunk_is_taken_to_last_four_stalls_at_most(chunk: int, token_seconds: float, idle: int) -> None:
    assert idle_chunk(chunk, max_stall=0.1, token_seconds=token_seconds) == idle


def test_the_configured_chunk_bounds_the_others() -> None:
    assert make_token_budget(chunk=20).chunk_tokens(0, contended=True) == 20
    assert measured(10**6, chunk=100).chunk_tokens(0, contended=True) == 100


def test_where_nothing_is_measured_deeper_in_cost_is_taken_to_grow_with_context() -> None:
    token_budget = measured(1000)
    near, far = token_budget.chunk_tokens(512, contended=True), token_budget.chunk_tokens(16_384, contended=True)
    assert near == pytest.approx(100 * (128 + 256) / (512 + 256), abs=1)
    assert far == SMALLEST_CHUNK
    token_budget.chunk_took(0.1, 200, 16_384, contended=True)
    assert token_budget.chunk_tokens(16_384, contended=True) > 180
    assert token_budget.chunk_tokens(128, contended=True) == 100


def test_what_is_measured_deep_down_is_not_exceeded_further_up() -> None:
    assert measured(500, context=8192).chunk_tokens(0, contended=True) == 50


@given(
    per_token=st.floats(1e-5, 1e-2),
    per_context=st.floats(0, 1e-6),
    fixed=st.floats(0, 0.03),
    start=st.integers(0, 4096),
)
def test_chunks_settle_on_what_the_machine_can_do(
    per_token: float, per_context: float, fixed: float, start: int
) -> None:
    """Whatever chunks cost, after a few of them one takes `max_stall`, or is the smallest or largest there is."""

    def cost(num_tokens: int, context: int) -> float:
        return fixed + num_tokens * (per_token + per_context * context)

    token_budget, context = make_token_budget(), start
    for _ in range(20):
        num_tokens = token_budget.chunk_tokens(context, contended=True)
        seconds = cost(num_tokens, context)
        token_budget.chunk_took(seconds, num_tokens, context, contended=True)
        context += num_tokens
    assert num_tokens == SMALLEST_CHUNK or seconds < 1.3 * 0.1
    assert num_tokens == 256 or seconds > 0.6 * 0.1


@pytest.mark.parametrize("decode_share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("step", [0.001, 0.02, 0.3])
def test_decoding_gets_its_share_before_the_next_chunk(decode_share: float, step: float) -> None:
    token_budget, decoded, chunks = make_token_budget(decode_share=decode_share), 0.0, 0.0
    token_budget.step_took(step)
    for _ in range(200):
        token_budget.chunk_took(0.1, 100, 0, contended=True)
        chunks += 0.1
        while True:
            due = token_budget.decoding_is_due  # asked while a step is under way
            token_budget.step_took(step)
            decoded += step
            if not due:
                break
    share = decoded / (decoded + chunks)
    assert decode_share - 1e-6 <= share
    most = 0.1 * decode_share / (1 - decode_share) + step
    assert share <= most / (most + 0.1) + 0.01


def test_a_chunk_that_kept_nobody_waiting_is_not_owed_for() -> None:
    token_budget = make_token_budget()
    token_budget.chunk_took(5.0, 2048, 0, contended=False)
    assert not token_budget.decoding_is_due
    token_budget.chunk_took(5.0, 2048, 0, contended=True)
    assert token_budget.decoding_is_due


def test_a_chunk_that_skipped_layers_is_owed_for_but_tells_no_rate() -> None:
    token_budget = make_token_budget()
    token_budget.chunk_took(0.1, 100, 0, contended=False)
    before = token_budget.chunk_tokens(0, contended=True)
    token_budget.chunk_took(0.01, 100, 0, contended=True, whole=False)
    assert token_budget.chunk_tokens(0, contended=True) == before
    assert token_budget.decoding_is_due


def test_what_may_go_before_its_turn_is_bounded() -> None:
    """Either way, until one side is ahead by all that the other has patience for."""
    token_budget = measured(1024)
    borrowed = 0
    while token_budget.may_prefill_more(128, 0):
        token_budget.chunk_took(0.125, 128, 0, contended=True)
        borrowed += 1
    assert borrowed == 10 * MAX_STALL // 0.125
    token_budget = measured(1024)
    lent = 0
    while token_budget.may_defer_decodes:
        token_budget.step_took(0.125, contended=True)
        lent += 1
    assert lent == 10 * MAX_STALL // 0.125 - 1, "the step under way counts"
    for _ in range(lent):
        assert not token_budget.decoding_is_due, "chunks get back what they gave"
        token_budget.chunk_took(0.125, 128, 0, contended=True)
    for _ in range(2):
        token_budget.chunk_took(0.125, 128, 0, contended=True)
    assert token_budget.decoding_is_due


def test_a_decode_step_in_its_own_turn_is_no_loan() -> None:
    token_budget = measured(1000)
    for _ in range(100):
        token_budget.step_took(0.1)
    token_budget.chunk_took(0.1, 100, 0, contended=True)
    token_budget.step_took(0.02)
    assert token_budget.decoding_is_due


def test_no_prompt_no_loan() -> None:
    token_budget = measured(1000)
    for _ in range(20):
        token_budget.step_took(0.02, contended=True)
    token_budget.reset()
    token_budget.chunk_took(0.1, 100, 0, contended=True)
    assert token_budget.decoding_is_due


def test_a_chunk_that_kept_nobody_waiting_gives_back_no_more_than_it_took() -> None:
    token_budget = measured(1000)
    for _ in range(5):
        token_budget.step_took(0.1, contended=True)
    token_budget.chunk_took(0.1, 100, 0, contended=False)
    token_budget.chunk_took(0.3, 300, 0, contended=True)
    assert not token_budget.decoding_is_due, "0.5 s were lent, 0.4 s came back"
    token_budget.chunk_took(0.4, 400, 0, contended=False)
    token_budget.chunk_took(0.2, 200, 0, contended=True)
    assert token_budget.decoding_is_due, "nobody is in debt for what kept nobody waiting"


def test_a_prompt_is_short_that_is_soon_done() -> None:
    token_budget = measured(1000, 4096)
    assert token_budget.is_short(900)
    assert not token_budget.is_short(1100)
    assert not make_token_budget(token_seconds=0.01).is_short(200), "assumed until it is measured"


@pytest.mark.parametrize("decode_share", [0.1, 0.5, 0.9])
def test_what_is_short_depends_on_no_share(decode_share: float) -> None:
    token_budget = make_token_budget(decode_share=decode_share, token_seconds=0.001)
    assert token_budget.is_short(900) and not token_budget.is_short(1100)
    assert token_budget.may_prefill_more(900, 0) and not token_budget.may_prefill_more(1100, 0)


def test_patience_has_an_end_where_stalls_may_be_long() -> None:
    token_budget = make_token_budget(max_stall=10.0, token_seconds=0.001)
    assert token_budget.is_short(1900) and not token_budget.is_short(2100)
