"""The function that mlx-lm's modules call for attention, and what stands in its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama, qwen3_next
from mlx_lm.models.cache import QuantizedKVCache

from agentcache import compat
from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena
from agentcache.kv.packing import Quantisation
from agentcache.kv.reads import Reads
from agentcache.kv.spec import LayerSpec
from agentcache.kv.step_cache import StepCache, Writes
from agentcache.models.interception import attention, intercept
from agentcache.models.layers import observe, observing
from tests.models import zoo
from tests.models.model_files import MODEL_FILES


def test_the_name_is_replaced_in_the_models_own_file_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (llama, qwen3_next):
        monkeypatch.setattr(module, "scaled_dot_product_attention", base.scaled_dot_product_attention)
    model = zoo.build("llama", MODEL_FILES["llama"].config)
    for _ in range(2):
        intercept(model)
        assert llama.scaled_dot_product_attention is attention
        original = compat.scaled_dot_product_attention
        assert qwen3_next.scaled_dot_product_attention is original is base.scaled_dot_product_attention


def test_somebody_elses_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "scaled_dot_product_attention", max)
    intercept(zoo.build("llama", MODEL_FILES["llama"].config))
    assert llama.scaled_dot_product_attention is max


def draw(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


@pytest.mark.parametrize("mask", [None, "causal"])
def test_arrays_are_computed_by_mlx_lm(mask: str | None) -> None:
    queries, keys, values = draw(1, 4, 3, 32), draw(1, 2, 3, 32), draw(1, 2, 3, 32)
    given = {"cache": None, "scale": 0.3, "mask": mask, "sinks": draw(4)}
    expected = base.scaled_dot_product_attention(queries, keys, values, **given)
    assert mx.array_equal(attention(queries, keys, values, **given), expected)


def test_mlx_lms_quantised_cache_goes_its_own_way() -> None:
    cache = QuantizedKVCache(group_size=32, bits=4)
    keys, values = cache.update_and_fetch(draw(1, 2, 3, 32), draw(1, 2, 3, 32))
    queries = draw(1, 4, 3, 32)
    expected = base.scaled_dot_product_attention(queries + 0, keys, values, cache=cache, scale=0.3, mask=None)
    assert mx.array_equal(attention(queries, keys, values, cache=cache, scale=0.3, mask=None), expected)


def step_cache(value_dim: int = 32) -> StepCache:
    arena = LayerArena(LayerSpec(0, 2, 32, value_dim), Quantisation(4, 32))
    arena.grow(1)
    return StepCache(arena, Reads([BlockTable([0])], [0], 3, None), Writes([BlockTable([0])], [0], 3), 0)


def test_handles_are_no_arrays() -> None:
    cache = step_cache()
    keys, values = cache.update_and_fetch(draw(1, 2, 3, 32), draw(1, 2, 3, 32))
    assert keys is values and cache.keys_and_values() == (keys, values)
    assert keys.astype(mx.float16) is keys and keys.dtype == mx.float32
    for wrong in (lambda: keys + 1, lambda: draw(3, 3) @ keys, lambda: keys[0], lambda: mx.softmax(keys)):
        with pytest.raises((TypeError, ValueError)):
            wrong()
    with pytest.raises(BrokenInvariant, match="layer 0 is read before it is written"):
        step_cache().keys_and_values()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mask": mx.ones((3, 3), mx.bool_)}, "the model passes a mask of its own"),
        ({"dropout": 0.1}, "paged attention does not support dropout"),
        ({"values": mx.zeros((1, 2, 3, 32))}, "cached keys with values that are not cached"),
        ({"keys": mx.zeros((1, 2, 3, 32))}, "keys of one layer with values of another"),
    ],
)
def test_what_is_asked_of_handles_beyond_attention_is_refused(change: dict[str, Any], sentence: str) -> None:
    keys, values = step_cache().update_and_fetch(draw(1, 2, 3, 32), draw(1, 2, 3, 32))
    with pytest.raises(BrokenInvariant, match=sentence):
        attention(**{"queries": draw(1, 4, 3, 32), "keys": keys, "values": values, "scale": 1.0, **change})


def test_an_observer_sees_what_attention_gives() -> None:
    seen: list[mx.array] = []
    queries, keys = draw(1, 2, 3, 32), draw(1, 2, 3, 32)
    with observing(seen.append):
        given = attention(queries, keys, keys, scale=1.0)
    attention(queries, keys, keys, scale=1.0)
    assert len(seen) == 1 and seen[0] is given and observe(given) is given


def test_modules_without_the_name_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_files", lambda model: [SimpleNamespace()])
    intercept(zoo.build("llama", MODEL_FILES["llama"].config))
