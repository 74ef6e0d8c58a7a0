"""RAM for the residual KV of an adapter or adapter family, with `ModelRunner`'s interface for blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
import numpy as np

from agentcache.blocks.pool import BlockPool, BlockTable, Copy
from agentcache.kv.arena import GroupArena, TensorArena, make_arenas
from agentcache.kv.backing import note_resized
from agentcache.kv.block_layout import Array, GroupMemory
from agentcache.kv.measures import Extras, TokenMeasures
from agentcache.kv.spec import CacheSpec

LARGEST_FLOAT16 = 65504.0


class ResidualArenas:
    """Arenas of one residual KV cache, for the thread that runs the model.

    Args:
        wait: waits until the device has finished the last step.
        evaluate: finishes all pending writes, including these arenas'.
        room: expected maximum bytes per group.
        measures: whether to record how far each token's own KV is from base's.
        is_family: whether a family shares the cache. Measures then depend on the reading adapter and are not saved.

    Attributes:
        measures: of the group `measured`.
        saturated: int32 [], number of NaNs and values too large for float16.
    """

    def __init__(
        self,
        spec: CacheSpec,
        pools: Sequence[BlockPool],
        wait: Callable[[], None],
        evaluate: Callable[[], None],
        *,
        room: int = 0,
        measures: bool = False,
        is_family: bool = False,
    ) -> None:
        self.spec = spec
        self.is_family = is_family
        self.evaluate = evaluate
        self.saturated = mx.array(0, mx.int32)
        # One group holds sums over the whole model; one without a window keeps all blocks.
        self.measured = next((index for index, group in enumerate(spec.groups) if group.window is None), 0)
        self.measures = TokenMeasures("divergence", 4) if measures else None
        self._pools = pools
        self._wait = wait
        self._arenas: list[GroupArena] = make_arenas(spec, room)
        self._tensors = {
            tensor.spec.name: (group, tensor) for group, arena in enumerate(self._arenas) for tensor in arena.tensors
        }

    def tensor(self, name: str) -> tuple[int, TensorArena]:
        """Return (group index, tensor); raises KeyError."""
        return self._tensors[name]

    def has(self, name: str) -> bool:
        return name in self._tensors

    def saturate(self, x: mx.array) -> mx.array:
        """Float32 as float16: NaN becomes 0, large values saturate; both count."""
        self.saturated = self.saturated + mx.logical_not(mx.abs(x) <= LARGEST_FLOAT16).sum()
        return mx.clip(mx.where(mx.isnan(x), 0, x), -LARGEST_FLOAT16, LARGEST_FLOAT16).astype(mx.float16)

    def fit(self) -> None:
        """Follow the pools: move blocks, free dropped slots, then add slots."""
        pairs = list(zip(self._arenas, self._pools, strict=True))
        self._follow_moves()
        if all(arena.capacity == pool.capacity for arena, pool in pairs):
            return
        self._wait()  # the running step holds the old arrays
        for arena, pool in pairs:
            arena.shrink(pool.capacity)
        for arena, pool in pairs:
            arena.grow(pool.capacity)
        if self.measures is not None:
            self.measures.fit(self._pools[self.measured].capacity)
        note_resized()

    def _follow_moves(self) -> None:
        for group, (arena, pool) in enumerate(zip(self._arenas, self._pools, strict=True)):
            moves = pool.take_moves()
            # Slots behind the arena's end never had memory.
            self._copy(Copy(group, source, target) for source, target in moves if source < arena.capacity)

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Copy-on-write, in order with the surrounding steps."""
        self.fit()
        self._copy(copies)

    def move_blocks(self, moves: Iterable[Copy]) -> None:
        """Copy blocks to their new slots, before `fit` follows the pools."""
        self._follow_moves()
        self._copy(moves)

    def _copy(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self._wait()
            self._arenas[copy.group].copy(copy.source, copy.target)
            if self.measures is not None and copy.group == self.measured:
                self.measures.copy(copy.source, copy.target)

    def put_blocks(self, group: int, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks from files, uint8 [n] each; they may change after the call."""
        self.fit()
        self._wait()  # the running step may still write there for a finished request
        self._arenas[group].put(block_ids, blocks)

    def memory(self, group: int) -> GroupMemory | None:
        """See `GroupArena.memory`. Compute nothing while it is in use."""
        self.fit()
        self._wait()
        return self._arenas[group].memory()

    def snapshot(self, group: int, block_id: int, num_tokens: int) -> Array:
        """A block's bytes for the writer, uint8 [n]."""
        self.fit()
        self._wait()
        return self._arenas[group].snapshot(block_id, num_tokens)

    def block_extras(self, group: int, block_id: int, num_tokens: int) -> Extras:
        if self.measures is None or group != self.measured or self.is_family:
            return {}
        self._wait()
        return self.measures.extras(block_id, num_tokens)

    def put_extras(self, group: int, block_id: int, num_tokens: int, extras: Extras) -> None:
        if self.measures is not None and group == self.measured and not self.is_family:
            self.measures.put(block_id, num_tokens, extras)

    def measured_of(self, tables: Sequence[BlockTable], num_tokens: int) -> tuple[np.ndarray, int]:
        """Sums over a prompt's known tokens, float64 [4], and their number.

        For a family only the last token counts, which the reading adapter has computed.
        """
        if self.measures is None:
            return np.zeros(4), 0
        self.fit()
        self.evaluate()
        return self.measures.sums(tables[self.measured], num_tokens, num_tokens - 1 if self.is_family else 0)

    @property
    def tensors(self) -> list[TensorArena]:
        measures = [] if self.measures is None else [self.measures.tokens]
        return [*measures, *(tensor for _, tensor in self._tensors.values())]
