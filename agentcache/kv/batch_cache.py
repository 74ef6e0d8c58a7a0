"""`BatchQuantizedKVCache`: any number of sequences, of any lengths, over the same Q4 arena.

A batch is a table of slots, not a copy: rows join and leave by editing lists, there is no padding on the left, and no
keys or values move. One object serves one layer; it keeps mlx-lm's duck-typed cache contract, so that unmodified mlx-lm
models run on it (`update_and_fetch` then gathers), while re-hosted attention reads the blocks in place (`update`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena, Packed, quantise
from agentcache.kv.step_plan import RowBatch, StepPlan


@dataclass(frozen=True)
class Step:
    """What attention needs after an update: the arena to read, and where."""

    arena: LayerArena
    plan: StepPlan


class BatchQuantizedKVCache:
    """One layer's cache of `len(lengths)` rows.

    Args:
        arena: the layer's arena; rows of a batch share it.
        rows: block tables of the layer's group.
        lengths: tokens each row holds.
    """

    def __init__(self, arena: LayerArena, rows: RowBatch, lengths: Sequence[int]) -> None:
        self.arena = arena
        self.rows = rows
        self.lengths = list(lengths)
        self._right_padding: list[int] | None = None

    @classmethod
    def standalone(cls, arena: LayerArena, pool: BlockPool, batch_size: int = 1) -> BatchQuantizedKVCache:
        """An empty cache that takes its slots from `pool` and grows the arena as needed."""
        tables = [BlockTable() for _ in range(batch_size)]
        return cls(arena, RowBatch(tables, arena.layer.window, pool), [0] * batch_size)

    # -- writing and reading ----------------------------------------------------------------------------------------

    def update(self, keys: mx.array, values: mx.array | None) -> Step:
        """Quantise and write keys [B, H_kv, n, D_k] and values [B, H_kv, n, D_v] (None for MLA) behind each row."""
        self._copy_shared(keys.shape[2])
        plan = self.rows.plan(self.lengths, keys.shape[2])
        self._follow_pool()
        for (_, side), new in zip(self.arena.sides, (keys, values), strict=False):
            packed = quantise(new, self.arena.quantisation)
            if plan.by_slices:
                side.write_slots(packed, plan.slots)
            else:
                side.write_scattered(packed, *plan.scatter)
        self.lengths = [length + plan.num_tokens for length in self.lengths]
        return Step(self.arena, plan)

    def _copy_shared(self, num_tokens: int) -> None:
        """Copy-on-write of the blocks that the next tokens go to and another cache also holds."""
        for table, position in self.rows.shared_blocks(self.lengths, num_tokens):
            target = self.rows.allocate()
            self._follow_pool()
            for _, side in self.arena.sides:
                side.copy(table.block_id(position), target)
            self.rows.replace(table, position, target)

    def _follow_pool(self) -> None:
        if self.rows.pool is not None:
            self.arena.grow(self.rows.pool.capacity)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[tuple[mx.array, ...], ...]:
        """mlx-lm's contract: update, then (data, scales, biases) of all keys and of all values, each [B, H_kv, T, ·].

        T covers whole blocks; `make_mask` masks what is beyond a row's length.
        """
        step = self.update(keys, values)
        return tuple(tuple(_rows(part) for part in side.gather(step.plan.block_ids)) for _, side in self.arena.sides)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """mlx-lm's contract: the mask for the next `N` tokens, bool [B, 1, N, T]."""
        self.check_window(window_size)
        return self.rows.plan(self.lengths, N).mask[:, None]

    def check_window(self, window_size: int | None) -> None:
        """Raises BrokenInvariant if a model thinks of another window than this cache's."""
        if window_size not in (None, self.rows.window):
            raise BrokenInvariant(f"this cache's window is {self.rows.window}, the model asks for {window_size}")

    @property
    def offset(self) -> int | mx.array:
        """Tokens held: an int for one row, else int32 [B]."""
        return self.lengths[0] if len(self.lengths) == 1 else mx.array(self.lengths)

    @property
    def bits(self) -> int:
        return self.arena.quantisation.bits

    @property
    def group_size(self) -> int:
        return self.arena.quantisation.group_size

    # -- rows join and leave ----------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[BatchQuantizedKVCache]) -> BatchQuantizedKVCache:
        """One cache with all rows of `caches`, which lie in one arena and are not to be used any more. Copies no KV."""
        first = caches[0]
        merged = cls(first.arena, RowBatch(list(first.rows.tables), first.rows.window, first.rows.pool), first.lengths)
        for cache in caches[1:]:
            merged.extend(cache)
        return merged

    def extend(self, other: BatchQuantizedKVCache) -> None:
        """Take over the rows of `other`, which is not to be used any more. Copies no KV."""
        if other.arena is not self.arena:
            raise BrokenInvariant("rows of different arenas cannot share a batch")
        self.rows = RowBatch(self.rows.tables + other.rows.tables, self.rows.window, self.rows.pool)
        self.lengths = self.lengths + other.lengths

    def extract(self, index: int) -> BatchQuantizedKVCache:
        """Row `index` as a cache of its own. Copies no KV: slots are shared until one of the two writes into them."""
        table = self.rows.tables[index]
        self.rows.retain(table.block_ids)
        fork = BlockTable(list(table.block_ids), table.first_block)
        rows = RowBatch([fork], self.rows.window, self.rows.pool)
        return BatchQuantizedKVCache(self.arena, rows, [self.lengths[index]])

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep just these rows, in this order; the slots that only the others hold go back to the pool."""
        kept = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        for index in set(range(len(self.lengths))) - set(kept):
            self.rows.release(self.rows.tables[index].block_ids)
        self.rows = RowBatch([self.rows.tables[i] for i in kept], self.rows.window, self.rows.pool)
        self.lengths = [self.lengths[i] for i in kept]

    def prepare(
        self, *, left_padding: object = None, lengths: object = None, right_padding: list[int] | None = None
    ) -> None:
        """mlx-lm's contract: the next updates carry `right_padding[i]` tokens too many in row i, until `finalize`."""
        if left_padding is not None:
            raise BrokenInvariant("paged rows have no padding on the left")
        self._right_padding = right_padding

    def finalize(self) -> None:
        """Forget the padding announced to `prepare`."""
        if self._right_padding is not None:
            self.lengths = [n - padding for n, padding in zip(self.lengths, self._right_padding, strict=True)]
            self._right_padding = None

    # -- the rest of the contract -----------------------------------------------------------------------------------

    @property
    def state(self) -> tuple[tuple[mx.array, ...], ...]:
        """(data, scales, biases) of keys and of values, each [B, H_kv, T, ·]; to evaluate or to compare."""
        if self.empty():
            return ()
        plan = StepPlan(self.rows.tables, self.lengths, 0, self.rows.window)
        return tuple(tuple(_rows(part) for part in side.gather(plan.block_ids)) for _, side in self.arena.sides)

    def row(self, index: int) -> dict[str, Packed]:
        """Exact contents of a row, [H_kv, length, ·] per side; with a window, from the first block it still needs."""
        plan = StepPlan([self.rows.tables[index]], [self.lengths[index]], 0, self.rows.window)
        sides = [(name, side.gather(plan.block_ids)) for name, side in self.arena.sides]
        return {name: Packed(*(_rows(part)[0, :, : plan.num_keys] for part in parts)) for name, parts in sides}

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every row; returns how many that were."""
        n = min([n, *self.lengths])
        self.lengths = [length - n for length in self.lengths]
        return n

    def size(self) -> int:
        return max(self.lengths, default=0)

    def empty(self) -> bool:
        return self.size() == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in the rows' tables, shared ones once."""
        slots = {block_id for table in self.rows.tables for block_id in table.block_ids}
        per_token = sum(side.num_heads * side.dim for _, side in self.arena.sides)
        return len(slots) * BLOCK_SIZE * (per_token * self.bits // 8 + per_token // self.group_size * 4)


def _rows(part: mx.array) -> mx.array:
    """[B, num_blocks, H, 256, ·] to [B, H, num_blocks * 256, ·]."""
    batch, blocks, heads, size, width = part.shape
    return part.swapaxes(1, 2).reshape(batch, heads, blocks * size, width)
