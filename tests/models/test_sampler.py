"""Choosing tokens: greedy, repeatable, truncated where asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.api.sampling import SamplingParams
from agentcache.errors import InvalidRequest
from agentcache.models.sampler import Row, Sampler, Scores, Tally, _counted, _kept_going, choose, log_softmax, masked
from tests.examples import examples

# Probabilities 0.4, 0.3, 0.2, 0.07, 0.03 in a shuffled order.
PROBABILITIES = np.array([0.2, 0.03, 0.4, 0.07, 0.3])
LOGITS = mx.array(np.log(PROBABILITIES).astype(np.float32)) + 2.5


def choose_one(sampler: Sampler, logits: mx.array, tokens: Sequence[int], position: int = 0) -> int:
    """The token after `tokens`."""
    row = Row(sampler, tokens[:-1], position)
    return int(choose([row], logits[None], mx.array(tokens[-1:], mx.int32)).item())


def draw(count: int = 400, logits: mx.array = LOGITS, **options: Any) -> list[int]:
    """What one sampler draws at `count` places in a row."""
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 3} | options))
    rows = [Row(sampler, (), position) for position in range(count)]
    chosen = choose(rows, mx.broadcast_to(logits, (count, *logits.shape)), mx.zeros(count, mx.int32))
    return [int(token) for token in chosen.tolist()]


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-300])
def test_temperature_zero_takes_the_best(temperature: float) -> None:
    assert set(draw(20, temperature=temperature)) == {2}


def test_a_seed_repeats_and_another_does_not() -> None:
    assert draw(50, seed=7) == draw(50, seed=7)
    assert draw(50, seed=7) != draw(50, seed=8)
    assert draw(50, seed=None) != draw(50, seed=None)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, 2**70])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert draw(20, seed=seed) == draw(20, seed=seed)


def test_tokens_come_as_often_as_they_should() -> None:
    counts = np.bincount(draw(2000), minlength=5) / 2000
    assert np.abs(counts - PROBABILITIES).max() < 0.035


def test_temperature_flattens_and_sharpens() -> None:
    for temperature in (0.5, 2.0):
        weights = PROBABILITIES ** (1 / temperature)
        counts = np.bincount(draw(1500, temperature=temperature), minlength=5) / 1500
        assert np.abs(counts - weights / weights.sum()).max() < 0.04


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_p": 0.0}, {2}),
        ({"top_p": 0.39}, {2}),
        ({"top_p": 0.65}, {2, 4}),
        ({"top_p": 0.95}, {0, 2, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {2}),
        ({"top_k": 3}, {0, 2, 4}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {2}),
        ({"min_p": 0.7}, {2, 4}),
        ({"min_p": 0.16}, {0, 2, 3, 4}),
        ({"top_k": 4, "min_p": 0.4}, {0, 2, 4}),
    ],
)
def test_truncation(options: dict[str, float], kept: set[int]) -> None:
    assert set(draw(**options)) == kept


def test_what_is_left_keeps_its_proportions() -> None:
    counts = np.bincount(draw(1500, top_k=2), minlength=5) / 1500
    assert abs(counts[2] - 4 / 7) < 0.04


def greedy(logits: list[float], tokens: list[int], **options: Any) -> int:
    return choose_one(Sampler(SamplingParams(temperature=0.0, **options)), mx.array(logits), tokens)


def test_repetition_is_penalised_whatever_the_sign() -> None:
    assert greedy([3.0, 2.0, 1.0], [0], repetition_penalty=2.0) == 1
    assert greedy([-1.0, -1.5, -9.0], [0, 0, 0], repetition_penalty=2.0) == 1
    assert greedy([3.0, 2.9], [0], repetition_penalty=1.0) == 0
    assert greedy([3.0, 2.0], [0] + [1] * 64, repetition_penalty=2.0) == 0  # too long ago


@settings(max_examples=examples(60))
@given(
    st.lists(st.integers(0, 7), max_size=30),
    st.floats(-2, 2, width=16),
    st.floats(-2, 2, width=16),
    st.integers(0, 7),
)
def test_frequency_and_presence_penalties_are_openais(
    generated: list[int], frequency: float, presence: float, last_of_prompt: int
) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts what was generated, not the prompt."""
    sampler = Sampler(SamplingParams(frequency_penalty=frequency, presence_penalty=presence))
    logits = np.random.default_rng(len(generated)).normal(size=8).astype(np.float32)
    counts = np.bincount(generated, minlength=8)
    row = Row(sampler, (), len(generated), Counter(generated[:-1]))
    last = mx.array([generated[-1] if generated else last_of_prompt], mx.int32)
    penalised = _counted([row], mx.array(logits)[None], last)
    np.testing.assert_allclose(
        np.array(penalised[0]), logits - counts * frequency - (counts > 0) * presence, rtol=1e-6, atol=1e-5
    )


def test_a_tally_counts_each_token_once() -> None:
    tally, ids = Tally(), [9, 9, 1, 2, 1, 1]
    assert tally.of(ids, 2, 1) == {}  # the last token of the prompt is not known to be the last one yet
    assert tally.of(ids, 2, 2) == {}
    assert tally.of(ids, 2, 4) == {1: 1, 2: 1}
    assert tally.of(ids, 2, 4) == {1: 1, 2: 1}
    assert tally.of(ids, 2, 6) == {1: 3, 2: 1}
    assert tally.of(ids, 2, 3) == {1: 1}  # its place in the cache was lost


def test_a_text_does_not_end_too_early() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0, min_tokens=2), eos_ids={0, 99})
    logits = mx.array([3.0, 2.0, 1.0])
    assert [choose_one(sampler, logits, [1], position) for position in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("options", [{"frequency_penalty": 1.0}, {"presence_penalty": -1.0}, {"min_tokens": 3}])
def test_rows_that_ask_for_none_of_it_keep_their_logits(options: dict[str, Any]) -> None:
    """Bit for bit, beside a row that does; and where no row does, nothing is computed at all."""
    plain, special = Sampler(SamplingParams(), {1}), Sampler(SamplingParams(**options), {1})
    logits, last = mx.random.normal((3, 8), key=mx.random.key(1)), mx.array([1, 2, 3], mx.int32)
    rows = [Row(plain, (), 2), Row(special, (), 2, Counter({2: 1})), Row(plain, (), 2)]
    changed = _kept_going(rows, _counted(rows, logits, last))
    assert mx.array_equal(changed[mx.array([0, 2])], logits[mx.array([0, 2])])
    assert not mx.array_equal(changed[1], logits[1])
    alone = rows[:1] * 3
    assert _kept_going(alone, _counted(alone, logits, last)) is logits


def test_biases_are_added() -> None:
    assert greedy([3.0, 2.0, 1.0], [0], logit_bias={2: 2.5}) == 2
    assert greedy([3.0, 2.0, 1.0], [0], logit_bias={0: -100.0, 1: -100.0}) == 2
    assert set(draw(logit_bias={2: -100.0})) == {0, 1, 3, 4}


def test_biases_of_tokens_without_logit_change_nothing() -> None:
    assert greedy([3.0, 2.0, 1.0], [0], logit_bias={3: 100.0, 10**8: 100.0, -1: 100.0}) == 0


def test_the_logits_given_are_left_alone() -> None:
    logits = mx.array([1.0, 2.0, 3.0])
    choose_one(Sampler(SamplingParams(temperature=0.0, repetition_penalty=2.0, logit_bias={0: 9.0})), logits, [2])
    assert logits.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits(dtype: mx.Dtype) -> None:
    assert set(draw(50, LOGITS.astype(dtype), top_k=2)) == {2, 4}


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50))
def test_log_softmax_is_that_of_numpy(logits: list[float]) -> None:
    x = np.array(logits, np.float64)
    expected = x - x.max() - math.log(np.exp(x - x.max()).sum())
    np.testing.assert_allclose(np.array(log_softmax(mx.array(logits))), expected, rtol=1e-5, atol=2e-3)


def test_log_softmax_of_half_precision_is_computed_in_float32() -> None:
    logprobs = log_softmax(mx.zeros(100_000, mx.float16))
    assert logprobs.dtype == mx.float32
    assert abs(logprobs[0].item() + math.log(100_000)) < 1e-4


def test_the_most_likely_tokens_come_first() -> None:
    logits = mx.stack([LOGITS, -LOGITS])
    best, worst = Scores(logits, mx.array([0, 1]), 3).read()
    assert [token for token, _ in best.top] == [2, 4, 0]
    np.testing.assert_allclose(np.exp([logprob for _, logprob in best.top]), [0.4, 0.3, 0.2], rtol=1e-4)
    assert math.exp(best.logprob) == pytest.approx(0.2, rel=1e-4)
    assert worst.top[0] == (1, worst.logprob)
    assert [score.top for score in Scores(logits, mx.array([0, 1]), 0).read()] == [(), ()]
    assert [len(score.top) for score in Scores(logits, mx.array([0, 1]), 99).read()] == [5, 5]


# -- a batch ----------------------------------------------------------------------------------------------------------

SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "top_k": st.sampled_from([0, 1, 5, 500]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7, -2.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -0.5]),
        "min_tokens": st.sampled_from([0, 0, 5]),
        "logit_bias": st.sampled_from([{}, {3: 5.0}, {7: -100.0, 999: 1.0}]),
        "seed": st.integers(0, 5),
    }
)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(SETTINGS, st.integers(1, 80), st.integers(0, 9)), min_size=1, max_size=16))
def test_a_row_gets_in_a_batch_what_it_gets_alone(rows: list[tuple[dict[str, Any], int, int]]) -> None:
    samplers = [Sampler(SamplingParams(**options), {3, 4, 10**6}) for options, _, _ in rows]
    texts = [[(7 * i + 3 * n) % 40 for n in range(length)] for i, (_, length, _) in enumerate(rows)]
    logits = mx.random.normal((len(rows), 40), key=mx.random.key(1)) * 3
    batch = [
        Row(sampler, text[:-1], at, Counter(text[-at:-1] if at else ()))
        for sampler, text, (_, _, at) in zip(samplers, texts, rows, strict=True)
    ]
    last = mx.array([text[-1] for text in texts], mx.int32)
    together = choose(batch, logits, last).tolist()
    alone = [choose([row], logits[i : i + 1], last[i : i + 1]).item() for i, row in enumerate(batch)]
    assert together == alone


def test_what_was_drawn_in_vain_changes_nothing() -> None:
    """A place in the text is drawn for again after a preemption, or when a lookahead was for nothing."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5))
    first = [choose_one(sampler, LOGITS, [0], position) for position in range(20)]
    assert [choose_one(sampler, LOGITS, [0], position) for position in range(20)] == first
    assert len(set(first)) > 1


def test_the_last_token_may_be_unknown_yet() -> None:
    """A penalty applies to a token that the device is still choosing."""
    logits = mx.array([[3.0, 2.0, 1.0]])
    pending = mx.argmax(logits, axis=-1).astype(mx.int32)
    row = Row(Sampler(SamplingParams(temperature=0.0, repetition_penalty=4.0)), (2,), 1)
    assert choose([row], logits, pending).tolist() == [1]


@pytest.mark.parametrize("size", [40, 64, 100])
def test_tokens_that_a_row_may_not_have(size: int) -> None:
    """Also where a model has more or fewer logits than the mask has bits; other rows keep their bits."""
    logits = mx.array(np.random.default_rng(0).standard_normal((3, size)), mx.float32)
    allowed = [0, 31, 32, 39, 63]
    mask = np.packbits(np.isin(np.arange(64), allowed), bitorder="little").view(np.uint32)
    result = np.array(masked(logits, {1: mask}))
    assert (result[[0, 2]] == np.array(logits)[[0, 2]]).all()
    finite = [token for token in allowed if token < size]
    assert np.flatnonzero(np.isfinite(result[1])).tolist() == finite
    assert (result[1, finite] == np.array(logits)[1, finite]).all()


# -- all that may be asked for ----------------------------------------------------------------------------------------

TINY = [5e-324, 1e-300, 1e-46, 1e-45, 1e-38, 1e-7]
EXTREMES = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, *TINY, 1e-5, 1.0, 100.0]) | st.floats(0, 100),
        "top_p": st.sampled_from([0.0, *TINY, 1.0 - 1e-16, 1.0]) | st.floats(0, 1),
        "top_k": st.sampled_from([-1, 0, 1, 39, 40, 41, 2**31, 2**32, 2**63, 2**64, 10**30]),
        "min_p": st.sampled_from([0.0, *TINY, 1.0]) | st.floats(0, 1),
        "repetition_penalty": st.sampled_from([0.01, 1.0, 100.0]) | st.floats(0.01, 100),
        "frequency_penalty": st.sampled_from([-2.0, 5e-324, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, -5e-324, 2.0]),
        "logit_bias": st.dictionaries(
            st.integers(-2, 45) | st.sampled_from([2**31, 2**63, 10**30, -(2**70)]),
            st.sampled_from([-100, -1e30, 5e-324, 100.0, 1e30]),
        ),
        "seed": st.none() | st.integers(-(2**70), 2**70),
        "min_tokens": st.sampled_from([0, 1, 2**31, 2**64]),
        "max_tokens": st.sampled_from([None, 0, 2**31, 2**64]),
    },
)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(EXTREMES, st.sets(st.integers(5, 39), min_size=1)), min_size=1, max_size=4),
    st.sampled_from([1.0, 1e-30, 1e4, 6e4]),
    st.integers(0, 100),
)
def test_what_is_chosen_is_a_token_that_may_be(
    rows: list[tuple[dict[str, Any], set[int]]], scale: float, seed: int
) -> None:
    """Whatever is asked for: of the vocabulary, none that a mask forbids, none that would end the text too early."""
    ends, text = {0, 4}, [7, 9, 9, 30, 7]
    batch = [
        Row(Sampler(SamplingParams(**options), ends), text[:-1], len(text), Counter(text[:-1])) for options, _ in rows
    ]
    bits = [np.isin(np.arange(64), [*allowed, *ends]) for _, allowed in rows]
    masks = {i: np.packbits(row, bitorder="little").view(np.uint32) for i, row in enumerate(bits)}
    logits = mx.random.normal((len(rows), 40), key=mx.random.key(seed)) * scale
    chosen = choose(batch, masked(logits, masks), mx.array([text[-1]] * len(rows), mx.int32)).tolist()
    for token, row, (_, allowed) in zip(chosen, batch, rows, strict=True):
        assert token in (allowed if row.sampler.min_tokens > row.position else allowed | ends)


OUTSIDE = [
    *(("temperature", value) for value in (-1, 100.1, 3.5e38, 1e39, 1e300, math.inf, math.nan, "1", None)),
    *((name, value) for name in ("top_p", "min_p") for value in (-5e-324, 1.1, math.inf, math.nan, "1", None)),
    *(("repetition_penalty", value) for value in (0, -1.0, 0.009, 101, 1e39, math.inf, math.nan)),
    *((n, v) for n in ("frequency_penalty", "presence_penalty") for v in (-2.1, 2.1, 1e39, -math.inf, math.nan)),
    *(("logit_bias", {3: value}) for value in (1e31, -1e39, math.inf, -math.inf, math.nan, "1", None)),
    *(("logit_bias", value) for value in ({"3": 1.0}, {1.5: 1.0}, {None: 1.0}, [3], None)),
    *(("top_k", value) for value in (-2, 1.5, "1", None)),
    *((name, value) for name in ("max_tokens", "min_tokens", "logprobs") for value in (-1, 1.5, "1", math.nan)),
    *(("seed", value) for value in (1.5, "1", math.nan)),
    *(("stop", value) for value in ("x", ("",), (1,), ["x"] * 17, ("x" * 16_385,), None)),
]


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_what_cannot_be_asked_for(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: value})
    assert (refused.value.param or "").partition(".")[0] == name


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(2): np.float32(1)})  # type: ignore[arg-type, dict-item]
    assert choose_one(Sampler(params), LOGITS, [0]) in {0, 2, 4}


def test_a_list_of_stop_strings_is_taken() -> None:
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))  # type: ignore[arg-type]
    assert hash(SamplingParams(stop=["a"]).stop) == hash(("a",))  # type: ignore[arg-type]
