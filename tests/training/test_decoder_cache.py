"""What a decoder reads in training: who sees whom, and values as the 4-bit cache holds them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packing import Quantisation
from agentcache.training.decoder_cache import DecoderCache, PromptCache, RoundedNorm, Rounding

Q4 = Quantisation(group_size=32)


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def held(x: mx.array) -> mx.array:
    return dequantise(quantise(x, Q4), Q4, x.dtype)


def filled(rows: int, length: int) -> PromptCache:
    cache = PromptCache(Rounding(Q4))
    cache.update_and_fetch(random(rows, 2, length, 64), random(rows, 2, length, 64, seed=1))
    return cache


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 6), st.none() | st.integers(1, 12))
def test_tokens_see_their_own_prompt_and_what_they_said(lengths: list[int], count: int, window: int | None) -> None:
    padded = 10
    cache = DecoderCache(filled(len(lengths), padded), mx.array(lengths))
    mask = np.array(cache.make_mask(count, window_size=window))
    for row, length in enumerate(lengths):
        places = [place if place < length else None for place in range(padded)] + [length + i for i in range(count)]
        for query in range(count):
            position = length + query
            seen = [
                place is not None and place <= position and (window is None or position - place < window)
                for place in places
            ]
            assert mask[row, 0, query].tolist() == seen


def test_the_decoders_keys_come_behind_the_prompts() -> None:
    prompt = filled(2, 3)
    new = random(2, 2, 5, 64, seed=2)
    keys, values = DecoderCache(prompt, mx.array([3, 1])).update_and_fetch(new, 2 * new)
    assert mx.array_equal(keys[:, :, :3], prompt.keys) and mx.array_equal(values[:, :, :3], prompt.values)
    assert mx.allclose(keys[:, :, 3:], held(new), atol=1e-5)
    assert mx.allclose(values[:, :, 3:], held(2 * new), atol=1e-5)
    assert not mx.allclose(keys[:, :, 3:], new, atol=1e-3)


def test_gradients_pass_the_rounding_but_not_the_prompt() -> None:
    x = random(1, 2, 3, 64)
    straight = mx.grad(lambda new: (2 * Rounding(Q4).keys(new)).sum())(x)
    assert mx.array_equal(straight, mx.full(x.shape, 2.0))
    blocked = mx.grad(lambda new: sum(side.sum() for side in PromptCache(Rounding(Q4)).update_and_fetch(new, new)))(x)
    assert mx.array_equal(blocked, mx.zeros(x.shape))


def test_of_a_latent_model_the_roped_part_is_rounded_and_the_latent_itself() -> None:
    keys, latent = random(1, 2, 3, 64 + 32), random(1, 3, 64)
    rounding = Rounding(Q4, latent_dim=64)
    assert mx.array_equal(rounding.keys(keys)[..., :64], keys[..., :64])
    assert mx.allclose(rounding.keys(keys)[..., 64:], held(keys[..., 64:]), atol=1e-5)
    assert mx.array_equal(rounding.values(keys), keys)
    assert mx.allclose(RoundedNorm(lambda x: 3 * x, Rounding(Q4))(latent), held(3 * latent), atol=1e-5)
