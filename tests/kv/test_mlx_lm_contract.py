"""The cache does in unmodified mlx-lm code what mlx-lm's own caches do."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache
from mlx_lm.utils import load_model

from agentcache.blocks.pool import BlockPool
from agentcache.kv.arena import LayerArena
from agentcache.kv.batch_cache import BatchQuantizedKVCache
from agentcache.kv.packed import quantise
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import LayerSpec
from tests.conftest import ModelFolder
from tests.kv.cache_cases import DIM, HEADS, Desk, History, assert_rows, batch_of

LENGTHS = [3, 256, 300, 511]


def upstream(histories: list[History]) -> BatchKVCache:
    caches = []
    for history in histories:
        cache = KVCache()
        cache.update_and_fetch(*history.round_trip())
        caches.append(cache)
    return BatchKVCache.merge(caches)


def attend(cache: BatchQuantizedKVCache, keys: mx.array, values: mx.array, queries: mx.array) -> mx.array:
    mask = cache.make_mask(queries.shape[2])
    fetched = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries + 0, *fetched, cache=cache, scale=0.2, mask=mask)


def attend_upstream(cache: BatchKVCache, keys: mx.array, values: mx.array, queries: mx.array) -> mx.array:
    mask = cache.make_mask(queries.shape[2])
    fetched = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries, *fetched, cache=cache, scale=0.2, mask=mask)


def draw_all(histories: list[History], num_tokens: int) -> tuple[list[mx.array], list[mx.array]]:
    """The next keys and values of all rows, [B, H, n, D]: as they are, and as they come out of the cache."""
    drawn = [history.draw(num_tokens) for history in histories]
    plain = [mx.array(np.stack(side)) for side in zip(*drawn, strict=True)]
    kept = [[side[:, :, -num_tokens:] for side in history.round_trip()] for history in histories]
    return plain, [mx.concatenate(side) for side in zip(*kept, strict=True)]


@pytest.mark.parametrize("num_tokens", [1, 3, 260])
def test_attention_and_extract_are_those_of_mlx_lm(num_tokens: int) -> None:
    ours, histories = batch_of(Desk(), LENGTHS)
    theirs = upstream(histories)
    for kept in (None, [3, 1, 2], [2]):
        if kept is not None:
            ours.filter(kept)
            theirs.filter(mx.array(kept))
            histories = [histories[i] for i in kept]
        plain, round_trip = draw_all(histories, num_tokens)
        queries = mx.random.normal((len(histories), 2 * HEADS, num_tokens, DIM), key=mx.random.key(num_tokens))
        expected = attend_upstream(theirs, *round_trip, queries)
        assert mx.allclose(attend(ours, *plain, queries), expected, rtol=1e-4, atol=1e-5).item()
        assert mx.array(ours.offset).reshape(-1).tolist() == theirs.offset.tolist()
        keys, _ = histories[0].round_trip()
        assert mx.array_equal(theirs.extract(0).keys, keys)


def test_right_padding_is_that_of_mlx_lm() -> None:
    """Prompts of several lengths in one chunk, padded on the right, then a decode step."""
    padding = [0, 7, 3]
    ours, histories = batch_of(Desk(), [250, 2, 40])
    theirs = upstream(histories)
    for cache in (ours, theirs):
        cache.prepare(lengths=[10 - p for p in padding], right_padding=padding)
    for cache, drawn in zip((ours, theirs), draw_all(histories, 10), strict=True):
        cache.update_and_fetch(*drawn)
        cache.finalize()
    for history, count in zip(histories, padding, strict=True):
        history.trim(count)
    assert_rows(ours, histories)
    assert ours.offset.tolist() == theirs.offset.tolist()
    plain, round_trip = draw_all(histories, 1)
    queries = mx.random.normal((3, HEADS, 1, DIM), key=mx.random.key(0))
    expected = attend_upstream(theirs, *round_trip, queries)
    assert mx.allclose(attend(ours, *plain, queries), expected, rtol=1e-4, atol=1e-5).item()
    ours.finalize()
    assert_rows(ours, histories)


# -- whole models, untouched -------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[int | None, ...]] = {
    "llama": (None, None, None, None),
    "mistral_sliding": (32, None, 32, None),
    "qwen2": (None, None, None, None),
    "gemma3_text": (32, 32, 32, 32, 32, None, 32, 32),
}
CHUNKS = [5, 256, 40, 1, 1]


class HalfScales(QuantizedKVCache):
    """mlx-lm's quantised cache with scales and biases in float16; windows come from the mask."""

    def __init__(self) -> None:
        super().__init__(group_size=64, bits=4)
        self._held: list[tuple[mx.array, ...]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[tuple[mx.array, ...], ...]:
        new = [tuple(quantise(x, Quantisation())) for x in (keys, values)]
        pairs = zip(self._held or new, new, strict=True)
        joined = [tuple(mx.concatenate(p, axis=2) for p in zip(*pair, strict=True)) for pair in pairs]
        self._held = joined if self._held else new
        self.offset += keys.shape[2]
        return tuple(self._held)


def our_caches(windows: tuple[int | None, ...], num_heads: int) -> list[BatchQuantizedKVCache]:
    specs = [LayerSpec(index, num_heads, 64, 64, window) for index, window in enumerate(windows)]
    return [BatchQuantizedKVCache.empty_rows(LayerArena(spec, Quantisation()), BlockPool()) for spec in specs]


@pytest.mark.parametrize("architecture", MODELS)
def test_an_unmodified_model_gives_the_logits_of_mlx_lms_quantised_cache(
    model_folder: ModelFolder, architecture: str
) -> None:
    model, config = load_model(model_folder(architecture))
    windows = MODELS[architecture]
    ours = our_caches(windows, config["num_key_value_heads"])
    half, plain = ([make() for _ in windows] for make in (HalfScales, lambda: QuantizedKVCache(64, 4)))
    rng = np.random.default_rng(0)
    for chunk in CHUNKS:
        ids = mx.array(rng.integers(0, config["vocab_size"], (1, chunk)))
        logits = model(ids, cache=ours)
        size = mx.abs(logits).max().item()
        assert mx.abs(logits - model(ids, cache=half)).max().item() < 1e-4 * size
        # float32 scales: a little off, as a rounded scale now and then gives a later layer's value another code.
        assert mx.abs(logits - model(ids, cache=plain)).mean().item() < 0.05 * size


@pytest.mark.slow
def test_a_ragged_batch_runs_on_an_unmodified_model(model_folder: ModelFolder) -> None:
    model, config = load_model(model_folder("gemma3_text"))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config["vocab_size"], (1, length)) for length in (4, 300, 60)]
    alone = [our_caches(MODELS["gemma3_text"], config["num_key_value_heads"]) for _ in prompts]
    together = our_caches(MODELS["gemma3_text"], config["num_key_value_heads"])
    for caches, prompt in zip(alone, prompts, strict=True):
        model(mx.array(prompt), cache=caches)
    padding = [300 - prompt.shape[1] for prompt in prompts]
    padded = np.concatenate([np.pad(p, ((0, 0), (0, n))) for p, n in zip(prompts, padding, strict=True)])
    for cache in together:
        cache.extend(BatchQuantizedKVCache.empty_rows(cache.arena, cache.pool, 2))
        cache.prepare(lengths=[prompt.shape[1] for prompt in prompts], right_padding=padding)
    model(mx.array(padded), cache=together)
    for cache in together:
        cache.finalize()
    for _ in range(3):
        ids = rng.integers(0, config["vocab_size"], (3, 1))
        logits = model(mx.array(ids), cache=together)
        for row, caches in enumerate(alone):
            expected = model(mx.array(ids[row : row + 1]), cache=caches)
            assert mx.allclose(logits[row : row + 1], expected, rtol=1e-3, atol=1e-4).item()
