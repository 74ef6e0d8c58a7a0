"""Choosing tokens: greedy, repeatable, truncated where asked."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.models.sampler import Sampler, log_softmax, top_logprobs

# Probabilities 0.4, 0.3, 0.2, 0.07, 0.03 in a shuffled order.
PROBABILITIES = np.array([0.2, 0.03, 0.4, 0.07, 0.3])
LOGITS = mx.array(np.log(PROBABILITIES).astype(np.float32)) + 2.5


def draw(count: int = 400, logits: mx.array = LOGITS, recent: tuple[int, ...] = (), **options: Any) -> list[int]:
    sampler = Sampler(**{"temperature": 1.0, "seed": 3} | options)
    tokens = mx.stack([sampler.choose(logits, recent).astype(mx.int32) for _ in range(count)])
    return [int(token) for token in tokens.tolist()]


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


def greedy(logits: list[float], recent: list[int], **options: Any) -> int:
    return int(Sampler(temperature=0.0, **options).choose(mx.array(logits), recent).item())


def test_repetition_is_penalised_whatever_the_sign() -> None:
    assert greedy([3.0, 2.0, 1.0], [0], repetition_penalty=2.0) == 1
    assert greedy([-1.0, -1.5, -9.0], [0, 0, 0], repetition_penalty=2.0) == 1
    assert greedy([3.0, 2.9], [0], repetition_penalty=1.0) == 0
    assert greedy([3.0, 2.0], [0] + [1] * 64, repetition_penalty=2.0) == 0  # too long ago
    assert greedy([3.0, 2.0], [], repetition_penalty=2.0) == 0


def test_biases_are_added() -> None:
    assert greedy([3.0, 2.0, 1.0], [], logit_bias={2: 2.5}) == 2
    assert greedy([3.0, 2.0, 1.0], [], logit_bias={0: -100.0, 1: -100.0}) == 2
    assert set(draw(logit_bias={2: -100.0})) == {0, 1, 3, 4}


def test_biases_of_tokens_without_logit_change_nothing() -> None:
    assert greedy([3.0, 2.0, 1.0], [], logit_bias={3: 100.0, 10**8: 100.0, -1: 100.0}) == 0


def test_the_logits_given_are_left_alone() -> None:
    logits = mx.array([1.0, 2.0, 3.0])
    Sampler(temperature=0.0, repetition_penalty=2.0, logit_bias={0: 9.0}).choose(logits, [2]).item()
    assert logits.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits(dtype: mx.Dtype) -> None:
    assert set(draw(50, LOGITS.astype(dtype), top_k=2)) == {2, 4}


@settings(max_examples=30, deadline=None)
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
    ids, values = top_logprobs(log_softmax(LOGITS), 3)
    assert ids == [2, 4, 0]
    np.testing.assert_allclose(np.exp(values), [0.4, 0.3, 0.2], rtol=1e-4)
    assert top_logprobs(log_softmax(LOGITS), 0) == ([], [])
    assert len(top_logprobs(log_softmax(LOGITS), 99)[0]) == 5
