"""Equal decode steps on the engine's runner and on mlx-lm's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.models import loader
from agentcache.models.runner import ModelRunner
from agentcache.models.step import StepInputs

_CHUNK = 2048


class Paged:
    def __init__(self, folder: Path) -> None:
        self.loaded = loader.load(str(folder))
        self.pools = [BlockPool() for _ in self.loaded.spec.groups]
        self.runner = ModelRunner(self.loaded, self.pools)
        self.tables: list[list[BlockTable]] = []
        self.context = 0

    def fill(self, rows: int, context: int, room: int, shared: bool = False) -> None:
        """Fill rows of `context` tokens, with room for `room` more; `shared` rows have all full context blocks in
        common.
        """
        common = context // BLOCK_SIZE if shared else 0
        own = -(-(context + room) // BLOCK_SIZE) - common
        for pool in self.pools:
            pool.grow(max(pool.capacity, common + rows * own))
        self.runner.fit()
        firsts = [common + row * own for row in range(rows)]
        ids = [[*range(common), *range(first, first + own)] for first in firsts]
        self.tables = [[BlockTable(list(each)) for _ in self.pools] for each in ids]
        self.context = context
        self.runner.evaluate()

    def steps(self, count: int) -> Iterator[None]:
        """Like the engine, start each step before reading the previous token."""
        token, started = mx.zeros((len(self.tables), 1), mx.int32), self.runner.start()
        for length in range(self.context, self.context + count):
            lengths = [length] * len(self.tables)
            step = StepInputs(
                token,
                lengths,
                reads=self.runner.reads(self.tables, lengths, 1),
                writes=self.runner.writes(self.tables, lengths, 1),
            )
            before, token = token, mx.argmax(self.runner.forward(step).logits[:, -1:], axis=-1).astype(mx.int32)
            started_before, started = started, self.runner.start(token)
            self.runner.wait_for(started_before)
            before.tolist()
            yield
        token.tolist()


class Bare:
    """mlx-lm's model on its own caches; `dtype` is that of weights and KV."""

    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder)
        parameters = [array for _, array in tree_flatten(self.model.parameters())]
        self.dtype = next(array.dtype for array in parameters if mx.issubdtype(array.dtype, mx.floating))
        self.caches: list[KVCache] = []
        self.rows = 0

    def fill(self, rows: int, context: int, room: int, shape: dict[str, Any]) -> None:
        self.rows = rows
        dims = (rows, shape["num_key_value_heads"], context, shape["head_dim"])
        self.caches = []
        for _ in self.model.layers:
            cache = KVCache()
            cache.state = mx.zeros(dims, self.dtype), mx.zeros(dims, self.dtype), context
            self.caches.append(cache)
        mx.eval([cache.state[:2] for cache in self.caches])

    def steps(self, count: int) -> Iterator[None]:
        """Step as `mlx_lm.generate` does."""
        token = mx.zeros((self.rows, 1), mx.int32)
        for _ in range(count):
            before, token = token, mx.argmax(self.model(token, cache=self.caches)[:, -1:], axis=-1).astype(mx.int32)
            mx.async_eval(token)
            before.tolist()
            yield
        token.tolist()

    def prefill(self, ids: Sequence[int]) -> None:
        caches = [KVCache() for _ in self.model.layers]
        for start in range(0, len(ids), _CHUNK):
            logits = self.model(mx.array([ids[start : start + _CHUNK]]), cache=caches)
            mx.eval([cache.state[:2] for cache in caches])
        mx.argmax(logits[:, -1], axis=-1).item()
