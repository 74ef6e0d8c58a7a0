"""Paged attention against attention in numpy over the values that the cache holds."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from agentcache.blocks.pool import BlockPool
from agentcache.kv.arena import LayerArena
from agentcache.kv.batch_cache import BatchQuantizedKVCache
from agentcache.kv.packed import dequantise
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import LayerSpec
from agentcache.kv.step_cache import PagedKV
from agentcache.models import attention
from agentcache.models.attention import MAX_PACKED_QUERIES, AttentionOptions, paged_attention
from tests.models.reference import naive_attention

Q4 = Quantisation(4, 64)
DIM = 64
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
HUGE = 30000.0


@dataclass(frozen=True)
class Case:
    """A step of `num_tokens` queries a row behind rows of `lengths` tokens."""

    lengths: tuple[int, ...]
    num_tokens: int
    heads: tuple[int, int] = (4, 2)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: mx.Dtype = mx.float32
    value_dim: int = DIM

    def options(self) -> AttentionOptions:
        sinks = mx.array([1.5, -1.0, 0.3, 4.0][: self.heads[0]]).astype(self.dtype) if self.sinks else None
        return AttentionOptions(scale=0.3, softcap=self.softcap, sinks=sinks)


def fill(case: Case, *, poison: bool) -> tuple[BatchQuantizedKVCache, PagedKV, mx.array]:
    """The cache after the step, what the step gave, and queries [B, H_q, n, D]."""
    arena, pool = LayerArena(LayerSpec(0, case.heads[1], DIM, case.value_dim, case.window), Q4), BlockPool()
    pool.grow(2)
    if poison:
        poison_arena(arena, pool)
    key = mx.random.key(sum(case.lengths) + case.num_tokens)
    rows = []
    for index, length in enumerate(case.lengths):
        cache = BatchQuantizedKVCache.empty_rows(arena, pool)
        if length:
            cache.update(*draw(case, 1, length, index))
        rows.append(cache)
    cache = BatchQuantizedKVCache.merge(rows)
    step = cache.update(*draw(case, len(rows), case.num_tokens, 99))
    queries = mx.random.normal((len(rows), case.heads[0], case.num_tokens, DIM), key=key) * 2
    return cache, step, queries.astype(case.dtype)


def draw(case: Case, batch: int, num_tokens: int, seed: int) -> tuple[mx.array, mx.array]:
    shape = (batch, case.heads[1], num_tokens)
    keys, values = mx.random.split(mx.random.key(seed))
    return mx.random.normal((*shape, DIM), key=keys), mx.random.normal((*shape, case.value_dim), key=values)


def poison_arena(arena: LayerArena, pool: BlockPool) -> None:
    """Fill every slot with the largest values, then hand the slots back."""
    pool.grow(40)
    cache = BatchQuantizedKVCache.empty_rows(arena, pool)
    num_tokens = pool.capacity * 256
    sign = mx.where(mx.arange(DIM) % 3 == 0, -HUGE, HUGE)
    huge = mx.broadcast_to(sign, (1, arena.layer.num_kv_heads, num_tokens, DIM))
    cache.update(huge, huge[..., : arena.layer.value_dim])
    mx.eval(arena.keys.arrays(), arena.values.arrays())
    cache.filter([])


def expected(case: Case, cache: BatchQuantizedKVCache, queries: mx.array) -> np.ndarray:
    options = case.options()
    sinks = None if options.sinks is None else np.array(options.sinks.astype(mx.float32))
    rows = []
    for index in range(len(case.lengths)):
        keys, values = (np.array(unpack(side)) for side in cache.row(index).values())
        q = np.array(queries[index].astype(mx.float32))
        rows.append(naive_attention(q, keys, values, scale=0.3, window=case.window, softcap=case.softcap, sinks=sinks))
    return np.stack(rows)


def unpack(side: Packed) -> mx.array:
    return dequantise(side, Q4, mx.float32)


def check(case: Case, *, poison: bool = True) -> None:
    cache, step, queries = fill(case, poison=poison)
    out = paged_attention(queries, step, case.options())
    assert out.dtype == case.dtype
    reference = expected_from_start(case, cache, queries)
    assert np.abs(np.array(out.astype(mx.float32)) - reference).max() < TOLERANCE[case.dtype] * np.abs(reference).max()


def expected_from_start(case: Case, cache: BatchQuantizedKVCache, queries: mx.array) -> np.ndarray:
    """`row` leaves out blocks behind the window after the step, so look at the row as if there were none."""
    cache.window = None
    return expected(case, cache, queries)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 9, 20, 256, 300])
@pytest.mark.parametrize("window", [None, 32])
def test_one_row(num_tokens: int, window: int | None, dtype: mx.Dtype) -> None:
    check(Case((290,), num_tokens, window=window, dtype=dtype))


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 520])
@pytest.mark.parametrize("num_tokens", [1, 7, 20])
@pytest.mark.parametrize("window", [None, 1, 40, 256])
def test_lengths_around_block_borders(length: int, num_tokens: int, window: int | None) -> None:
    check(Case((length,), num_tokens, window=window))


@pytest.mark.parametrize("num_tokens", [*range(1, 10), 20])
@pytest.mark.parametrize("window", [None, 32, 300])
def test_ragged_batches(num_tokens: int, window: int | None) -> None:
    check(Case((0, 3, 256, 700), num_tokens, window=window))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_ragged_batches_in_half_precision(num_tokens: int, dtype: mx.Dtype) -> None:
    check(Case((5, 256, 300), num_tokens, window=40, dtype=dtype))


@pytest.mark.parametrize("num_tokens", [1, 9, 260])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("sinks", [False, True])
def test_heads_and_sinks(heads: tuple[int, int], num_tokens: int, sinks: bool) -> None:
    check(Case((290,), num_tokens, heads=heads, sinks=sinks))


@pytest.mark.parametrize("num_tokens", [1, 9, 40])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_everything_at_once(num_tokens: int, softcap: float | None, dtype: mx.Dtype) -> None:
    for lengths in ((290,), (5, 290)):
        check(Case(lengths, num_tokens, window=64, softcap=softcap, sinks=True, dtype=dtype))


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_values_narrower_than_keys(num_tokens: int) -> None:
    case = Case((290,), num_tokens)
    arena = LayerArena(LayerSpec(0, 2, 128, 64), Q4)
    cache = BatchQuantizedKVCache.empty_rows(arena, BlockPool())
    shapes = ((2, 300, 128), (2, 300, 64), (4, 300, 128))
    keys, values, queries = (mx.random.normal((1, *shape), key=mx.random.key(sum(shape))) for shape in shapes)
    queries = queries[:, :, :num_tokens]
    cache.update(keys[:, :, :-num_tokens], values[:, :, :-num_tokens])
    out = paged_attention(queries, cache.update(keys[:, :, -num_tokens:], values[:, :, -num_tokens:]), case.options())
    assert np.allclose(np.array(out), expected(case, cache, queries), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("without_kernels")
def test_few_queries_read_packed_blocks_and_many_unpacked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("packed_attention", "flash_attention"):
        original = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *a, n=name, f=original: taken.append(n) or f(*a))
    for num_tokens in (MAX_PACKED_QUERIES, MAX_PACKED_QUERIES + 1):
        _, step, queries = fill(Case((10,), num_tokens), poison=False)
        paged_attention(queries, step, AttentionOptions(1.0))
    assert taken == ["packed_attention", "flash_attention"]


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_does_not_depend_on_its_neighbours(window: int | None) -> None:
    """Bit for bit, as far as the row's blocks are the same number."""
    together = Case((300, 290), 1, window=window)
    _, step, queries = fill(together, poison=False)
    batched = paged_attention(queries, step, together.options())
    poisoned, step, _ = fill(together, poison=True)
    assert poisoned.lengths == [301, 291]
    assert mx.array_equal(paged_attention(queries, step, together.options()), batched)
