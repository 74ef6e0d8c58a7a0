"""Rows with a known history, and what a cache should hold of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from agentcache.blocks.pool import BlockPool
from agentcache.kv.arena import LayerArena
from agentcache.kv.batch_cache import BatchQuantizedKVCache
from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.packing import Quantisation
from agentcache.kv.spec import LayerSpec

HEADS, DIM = 2, 32
QUANTISATION = Quantisation(4, 32)


@dataclass
class Desk:
    """One arena with its pool."""

    window: int | None = None
    value_dim: int = DIM
    pool: BlockPool = field(default_factory=BlockPool)

    def __post_init__(self) -> None:
        self.arena = LayerArena(LayerSpec(0, HEADS, DIM, self.value_dim, self.window), QUANTISATION)

    def cache(self, batch_size: int = 1) -> BatchQuantizedKVCache:
        return BatchQuantizedKVCache.empty_rows(self.arena, self.pool, batch_size)

    def check(self, *caches: BatchQuantizedKVCache) -> None:
        """Exactly the slots in the caches' tables are in use."""
        self.pool.check_integrity()
        used = {block for cache in caches for table in cache.tables for block in table.block_ids}
        assert self.pool.capacity - self.pool.num_free == len(used)


@dataclass
class History:
    """All keys and values that a row was given, [H, length, D]."""

    seed: int
    keys: np.ndarray = field(default_factory=lambda: np.zeros((HEADS, 0, DIM), np.float32))
    values: np.ndarray = field(default_factory=lambda: np.zeros((HEADS, 0, DIM), np.float32))
    drawn: int = 0

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def draw(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The row's next keys and values, [H, num_tokens, D]."""
        rng = np.random.default_rng([self.seed, self.drawn])
        self.drawn += 1
        keys, values = (rng.standard_normal((2, HEADS, num_tokens, DIM)) * 3).astype(np.float32)
        self.keys = np.concatenate([self.keys, keys], axis=1)
        self.values = np.concatenate([self.values, values], axis=1)
        return keys, values

    def trim(self, num_tokens: int) -> None:
        self.keys, self.values = (side[:, : self.length - num_tokens] for side in (self.keys, self.values))

    def fork(self, seed: int) -> History:
        return History(seed, self.keys, self.values)

    def packed(self) -> dict[str, Packed]:
        return {
            name: quantise(mx.array(side), QUANTISATION)
            for name, side in (("key_cache", self.keys), ("value_cache", self.values))
        }

    def round_trip(self) -> tuple[mx.array, mx.array]:
        """Keys and values as they come out of the cache, float32 [1, H, length, D]."""
        keys, values = (dequantise(side, QUANTISATION, mx.float32)[None] for side in self.packed().values())
        return keys, values


def step(cache: BatchQuantizedKVCache, histories: list[History], num_tokens: int) -> None:
    """Add `num_tokens` tokens to every row."""
    drawn = [history.draw(num_tokens) for history in histories]
    cache.update(*(mx.array(np.stack(side)) for side in zip(*drawn, strict=True)))


def assert_rows(cache: BatchQuantizedKVCache, histories: list[History]) -> None:
    """Every row holds its history, bit for bit."""
    assert cache.lengths == [history.length for history in histories]
    for index, history in enumerate(histories):
        row = cache.row(index)
        for name, packed in history.packed().items():
            for part, expected in zip(row[name], packed, strict=True):
                np.testing.assert_array_equal(np.array(part), np.array(expected))


def batch_of(desk: Desk, lengths: list[int]) -> tuple[BatchQuantizedKVCache, list[History]]:
    """Rows filled alone, then merged."""
    histories = [History(seed) for seed in range(len(lengths))]
    caches = [desk.cache() for _ in lengths]
    for cache, history, length in zip(caches, histories, lengths, strict=True):
        if length:
            step(cache, [history], length)
    return BatchQuantizedKVCache.merge(caches), histories
