"""mlx-lm's cache contract over an arena. The engine uses `StepCache`."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.packing import Quantisation
from agentcache.kv.reads import BlockReads, Reads
from agentcache.kv.step_cache import PagedKV, Writes, check_window


class BatchQuantizedKVCache:
    """One layer's cache. `arena` grows with `pool`."""

    def __init__(
        self, arena: LayerArena, pool: BlockPool, tables: Sequence[BlockTable], lengths: Sequence[int]
    ) -> None:
        self.arena = arena
        self.tables = list(tables)
        self.lengths = list(lengths)
        self.pool = pool
        self.window = arena.layer.window
        self._right_padding: list[int] | None = None

    @classmethod
    def empty_rows(cls, arena: LayerArena, pool: BlockPool, batch_size: int = 1) -> BatchQuantizedKVCache:
        return cls(arena, pool, [BlockTable() for _ in range(batch_size)], [0] * batch_size)

    def update(self, keys: mx.array, values: mx.array | None) -> PagedKV:
        """Quantise and append; shapes as in `Writes.put`."""
        num_tokens = keys.shape[2]
        self._copy_shared(num_tokens)
        self._reserve(num_tokens)
        self.arena.grow(self.pool.capacity)
        reads = self._reads(num_tokens)
        Writes(self.tables, self.lengths, num_tokens).put(self.arena, keys, values)
        self.lengths = [length + num_tokens for length in self.lengths]
        return PagedKV(self.arena, reads)

    def _copy_shared(self, num_tokens: int) -> None:
        for table, length in zip(self.tables, self.lengths, strict=True):
            end = min(-(-(length + num_tokens) // BLOCK_SIZE), table.end_block)
            for position in range(length // BLOCK_SIZE, end):
                source = table.block_id(position)
                if self.pool.ref_cnt(source) > 1:
                    target = self._allocate()
                    self.arena.grow(self.pool.capacity)
                    for _, side in self.arena.sides:
                        side.copy(source, target)
                    self.pool.release(source)
                    table.replace(position, target)

    def _reserve(self, num_tokens: int) -> None:
        for table, length in zip(self.tables, self.lengths, strict=True):
            while table.end_block * BLOCK_SIZE < length + num_tokens:
                table.block_ids.append(self._allocate())

    def _allocate(self) -> int:
        if not self.pool.num_free:
            self.pool.grow(self.pool.capacity + max(4, self.pool.capacity // 2))
        return self.pool.allocate()

    def _reads(self, num_tokens: int) -> BlockReads:
        return Reads(self.tables, self.lengths, num_tokens, self.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[tuple[mx.array, ...], ...]:
        """Update; return (data, scales, biases) of keys and values, [B, H_kv, T, ·] in whole blocks."""
        return self._gather(self.update(keys, values).reads)

    def _gather(self, reads: BlockReads) -> tuple[tuple[mx.array, ...], ...]:
        return tuple(tuple(_rows(part) for part in side.gather(reads.block_ids).parts) for _, side in self.arena.sides)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Mask for the next `N` tokens, bool [B, 1, N, T]."""
        check_window(self.arena, window_size)
        self._reserve(N)
        return self._reads(N).mask[:, None]

    @property
    def offset(self) -> int | mx.array:
        """Tokens of the row, or int32 [B]."""
        return self.lengths[0] if len(self.lengths) == 1 else mx.array(self.lengths)

    @property
    def bits(self) -> int:
        return self._quantisation.bits

    @property
    def group_size(self) -> int:
        return self._quantisation.group_size

    @property
    def _quantisation(self) -> Quantisation:
        made = self.arena.keys.quantisation
        if not isinstance(made, Quantisation) or {side.quantisation for _, side in self.arena.sides} != {made}:
            raise BrokenInvariant("mlx-lm reads keys and values that are quantised in one way")
        return made

    @classmethod
    def merge(cls, caches: Sequence[BatchQuantizedKVCache]) -> BatchQuantizedKVCache:
        """Combine rows of one arena. `caches` become unusable."""
        first = caches[0]
        merged = cls(first.arena, first.pool, first.tables, first.lengths)
        for cache in caches[1:]:
            merged.extend(cache)
        return merged

    def extend(self, other: BatchQuantizedKVCache) -> None:
        """Append rows. `other` becomes unusable."""
        if other.arena is not self.arena:
            raise BrokenInvariant("rows of different arenas cannot share a batch")
        self.tables = self.tables + other.tables
        self.lengths = self.lengths + other.lengths

    def extract(self, index: int) -> BatchQuantizedKVCache:
        """Return a row; slots are shared until written."""
        table = self.tables[index]
        for block_id in table.block_ids:
            self.pool.retain(block_id)
        fork = BlockTable(list(table.block_ids), table.first_block)
        return BatchQuantizedKVCache(self.arena, self.pool, [fork], [self.lengths[index]])

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        kept = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        for index in set(range(len(self.lengths))) - set(kept):
            for block_id in self.tables[index].block_ids:
                self.pool.release(block_id)
        self.tables = [self.tables[i] for i in kept]
        self.lengths = [self.lengths[i] for i in kept]

    def prepare(
        self, *, left_padding: object = None, lengths: object = None, right_padding: list[int] | None = None
    ) -> None:
        """Until `finalize`, updates end with `right_padding[i]` padding tokens in row i."""
        if left_padding is not None:
            raise BrokenInvariant("paged rows have no padding on the left")
        self._right_padding = right_padding

    def finalize(self) -> None:
        if self._right_padding is not None:
            self.lengths = [n - padding for n, padding in zip(self.lengths, self._right_padding, strict=True)]
            self._right_padding = None

    @property
    def state(self) -> tuple[tuple[mx.array, ...], ...]:
        if self.empty():
            return ()
        return self._gather(self._reads(0))

    def row(self, index: int) -> dict[str, Packed]:
        """A row's [H_kv, length, ·] per side; with a window, from the first block needed."""
        reads = Reads([self.tables[index]], [self.lengths[index]], 0, self.window)
        sides = [(name, side.gather(reads.block_ids)) for name, side in self.arena.sides]
        return {name: Packed(*(_rows(part)[0, :, : reads.num_keys] for part in packed.parts)) for name, packed in sides}

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min([n, *self.lengths])
        self.lengths = [length - n for length in self.lengths]
        return n

    def size(self) -> int:
        return max(self.lengths, default=0)

    def empty(self) -> bool:
        return self.size() == 0

    @property
    def nbytes(self) -> int:
        slots = {block_id for table in self.tables for block_id in table.block_ids}
        per_token = sum(side.num_heads * side.dim for _, side in self.arena.sides)
        return len(slots) * BLOCK_SIZE * (per_token * self.bits // 8 + per_token // self.group_size * 4)


def _rows(part: mx.array) -> mx.array:
    """[B, num_blocks, H, 256, ·] to [B, H, num_blocks * 256, ·]."""
    batch, blocks, heads, size, width = part.shape
    return part.swapaxes(1, 2).reshape(batch, heads, blocks * size, width)
