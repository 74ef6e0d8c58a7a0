"""Runs the model over the arenas: one forward pass for one batch of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.blocks.sequence import Copy
from agentcache.blocks.trunk import TrunkPlan
from agentcache.kv.arena import GroupArena, make_arenas
from agentcache.kv.batch_cache import BatchQuantizedKVCache
from agentcache.kv.block_layout import Array
from agentcache.kv.step_plan import RowBatch
from agentcache.models.decoder import DecoderWeights
from agentcache.models.loader import LoadedModel
from agentcache.models.lora import RowAdapter


class RehostedCache(BatchQuantizedKVCache):
    """One layer's cache for re-hosted attention, which masks by the step's plan: mlx-lm's model gets no mask."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        self.check_window(window_size)


class ModelRunner:
    """Owns the arenas and the only calls into the model. All methods belong to the thread that loaded the model.

    Counters: `forward_tokens` tokens computed, `copied_blocks` blocks copied on write.
    """

    def __init__(self, loaded: LoadedModel, pools: Sequence[BlockPool]) -> None:
        self._loaded = loaded
        self._pools = pools
        self.arenas: list[GroupArena] = make_arenas(loaded.spec)
        self._is_busy = False
        self.forward_tokens = 0
        self.copied_blocks = 0

    def forward(
        self,
        token_ids: mx.array,
        tables: Sequence[Sequence[BlockTable]],
        lengths: Sequence[int],
        *,
        all_logits: bool = False,
        adapters: Sequence[RowAdapter | None] = (),
        decoder: DecoderWeights | None = None,
        trunk: TrunkPlan | None = None,
    ) -> mx.array:
        """Compute a step and write its keys and values; nothing is evaluated yet.

        Args:
            token_ids: int32 [B, n]; may be what a step under way is about to choose.
            tables: per row one block table per group, with room for the step.
            lengths: tokens each row holds already.
            all_logits: logits of every position, not only of the last one.
            adapters: per row the adapter it is computed with, or None; nothing for base alone.
            decoder: computes the step in place of the base model, on the same cache.
            trunk: for a step of one row without decoder, the hidden states to go on from and to keep. The cache holds
                keys and values below its cut already.

        Returns:
            Logits [B, n or 1, vocabulary].
        """
        self.fit()
        caches = self._layer_caches(tables, lengths)
        computes: LoadedModel | DecoderWeights = self._loaded if decoder is None else decoder
        computes.last.all_positions = all_logits
        self.forward_tokens += token_ids.size
        with (
            self._loaded.adapters.step(adapters, lengths, token_ids.shape[1]),
            self._loaded.trunk.step(trunk, token_ids.size),
        ):
            return computes.model(token_ids, cache=caches)

    def reset_counters(self) -> None:
        """What was computed until now does not count."""
        self.forward_tokens = self._loaded.trunk.layer_tokens = 0

    def _layer_caches(self, tables: Sequence[Sequence[BlockTable]], lengths: Sequence[int]) -> list[RehostedCache]:
        caches: dict[int, RehostedCache] = {}
        for index, arena in enumerate(self.arenas):
            rows = RowBatch([row[index] for row in tables], arena.spec.window)
            for layer in arena.layers:
                caches[layer.layer.index] = RehostedCache(layer, rows, lengths)
        return [caches[index] for index in sorted(caches)]

    def fit(self) -> None:
        """Follow the pools: memory of slots they gave up is given back first, then new slots get theirs."""
        if all(arena.capacity == pool.capacity for arena, pool in zip(self.arenas, self._pools, strict=True)):
            return
        self.wait()  # what is under way holds the old arrays
        for arena, pool in zip(self.arenas, self._pools, strict=True):
            arena.shrink(pool.capacity)
        for arena, pool in zip(self.arenas, self._pools, strict=True):
            arena.grow(pool.capacity)

    def start(self, *outputs: mx.array) -> None:
        """Have the device compute `outputs` and every write into the arenas that is due, without waiting for the end.

        What was started before is finished first: an arena that is still being read is not written in place but copied.
        """
        self.wait()
        self._is_busy = True
        mx.async_eval(*outputs, *self._arena_arrays(), *self._loaded.trunk.blocks.written())

    def wait(self) -> None:
        """Return when the device has done what was started last."""
        # Not by evaluating what was started: an arena's array object stands for the writes of the next batch by now.
        if self._is_busy:
            mx.synchronize()
            self._is_busy = False

    def evaluate(self) -> None:
        """Finish every write into the arenas."""
        self.start()
        self.wait()

    def _arena_arrays(self) -> list[mx.array]:
        return [array for arena in self.arenas for array in arena.arrays()]

    def release_buffers(self) -> None:
        """Give temporaries of a large step back: on a Mac they are taken from the same memory as everything else."""
        if mx.default_device() == mx.gpu:
            mx.clear_cache()

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Copy-on-write, lazily, in order with the steps around it."""
        self.fit()
        for copy in copies:
            self.arenas[copy.group].copy(copy.source, copy.target)
            self.copied_blocks += 1

    def put_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks that were read from files: uint8 [n] each."""
        self.fit()
        self.arenas[group].put(block_ids, blocks)

    def snapshot(self, group: int, block_id: int, position: int, num_tokens: int) -> dict[str, np.ndarray]:
        """Copies of a block's bytes, for the writer."""
        self.wait()
        return self.arenas[group].snapshot(block_id, position, num_tokens)
