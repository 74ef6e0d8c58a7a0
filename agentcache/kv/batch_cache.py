"""`BatchQuantizedKVCache`: any number of sequences, of any lengths, over the same Q4 arena.

A batch is a table of slots, not a copy: rows join and leave by editing lists, there is no padding on the left, and no
keys or values move. One object serves one layer; it keeps mlx-lm's duck-typed cache contract, so that unmodified mlx-lm
models run on it (`update_and_fetch` then gathers), while re-hosted attention reads the blocks in place (`update`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import LayerArena, Packed, Slot, quantise

_MAX_SLICES = 16  # beyond this many runs one scatter is cheaper than slice assignments


class StepPlan:
    """Where one step of `num_tokens` tokens a row is written and read; the same for all layers of a group.

    Args:
        tables: the rows' block tables, already long enough.
        lengths: tokens each row holds before the step.
        num_tokens: tokens added to every row.
        window: number of most recent tokens attended to; None for all.
    """

    def __init__(self, tables: Sequence[BlockTable], lengths: Sequence[int], num_tokens: int, window: int | None) -> None:
        self.num_tokens = num_tokens
        self.window = window
        self._lengths = lengths
        self._tables = tables
        self._firsts = [self._first_block(table, length) for table, length in zip(tables, lengths, strict=True)]
        self._lasts = [-(-(length + num_tokens) // BLOCK_SIZE) for length in lengths]

    def _first_block(self, table: BlockTable, length: int) -> int:
        needed = 0 if self.window is None else max(0, length - self.window + 1) // BLOCK_SIZE
        return max(needed, table.first_block)

    @property
    def batch_size(self) -> int:
        return len(self._tables)

    @cached_property
    def slots(self) -> list[Slot]:
        """Runs of tokens inside single blocks; for one row only."""
        table, start, runs = self._tables[0], self._lengths[0], []
        done = 0
        while done < self.num_tokens:
            block, offset = divmod(start + done, BLOCK_SIZE)
            count = min(BLOCK_SIZE - offset, self.num_tokens - done)
            runs.append(Slot(table.block_id(block), offset, done, done + count))
            done += count
        return runs

    @cached_property
    def scatter(self) -> tuple[mx.array, mx.array]:
        """Slot and place of every token, both [B * num_tokens]."""
        places = [
            (table.block_id(position // BLOCK_SIZE), position % BLOCK_SIZE)
            for table, length in zip(self._tables, self._lengths, strict=True)
            for position in range(length, length + self.num_tokens)
        ]
        return mx.array([block for block, _ in places]), mx.array([offset for _, offset in places])

    @property
    def by_slices(self) -> bool:
        return self.batch_size == 1 and self.num_tokens <= _MAX_SLICES * BLOCK_SIZE

    @cached_property
    def num_blocks(self) -> int:
        """Blocks read per row; shorter rows read a masked block in place of the missing ones."""
        return max(last - first for first, last in zip(self._firsts, self._lasts, strict=True))

    @cached_property
    def block_ids(self) -> mx.array:
        """Slots to read, int32 [B, num_blocks]."""
        rows = []
        for table, first, last in zip(self._tables, self._firsts, self._lasts, strict=True):
            ids = table.block_ids[first - table.first_block : last - table.first_block]
            rows.append(ids + [ids[0]] * (self.num_blocks - len(ids)))
        return mx.array(rows, dtype=mx.int32)

    @property
    def key_start(self) -> int:
        """Position of the first key read; for one row only."""
        return self._firsts[0] * BLOCK_SIZE

    @property
    def num_keys(self) -> int:
        """Keys of a single row from `key_start` to the end of the step."""
        return self._lengths[0] + self.num_tokens - self.key_start

    @cached_property
    def mask(self) -> mx.array:
        """Which keys each query attends to, bool [B, num_tokens, num_blocks * 256]."""
        starts = mx.array([first * BLOCK_SIZE for first in self._firsts])[:, None, None]
        keys = mx.arange(self.num_blocks * BLOCK_SIZE)[None, None, :] + starts
        queries = (mx.array(self._lengths)[:, None] + mx.arange(self.num_tokens)[None, :])[:, :, None]
        allowed = keys <= queries
        return allowed if self.window is None else allowed & (keys > queries - self.window)


class RowBatch:
    """The rows of one group: block tables, and a plan per step that the group's layers share.

    Args:
        tables: one per row.
        window: the group's window.
        pool: where to take further slots; None where the caller reserves them beforehand.
    """

    def __init__(self, tables: list[BlockTable], window: int | None, pool: BlockPool | None = None) -> None:
        self.tables = tables
        self.window = window
        self.pool = pool
        self._plan: StepPlan | None = None
        self._planned_for: tuple[tuple[int, ...], int] | None = None

    def plan(self, lengths: Sequence[int], num_tokens: int) -> StepPlan:
        """The plan for adding `num_tokens` tokens to rows of these lengths."""
        key = (tuple(lengths), num_tokens)
        if self._plan is None or self._planned_for != key:
            self._reserve(lengths, num_tokens)
            self._plan, self._planned_for = StepPlan(self.tables, key[0], num_tokens, self.window), key
        return self._plan

    def _reserve(self, lengths: Sequence[int], num_tokens: int) -> None:
        for table, length in zip(self.tables, lengths, strict=True):
            while table.end_block * BLOCK_SIZE < length + num_tokens:
                table.block_ids.append(self._allocate())

    def _allocate(self) -> int:
        if self.pool is None:
            raise BrokenInvariant("a step was run without reserving its blocks")
        if not self.pool.num_free:
            self.pool.grow(self.pool.capacity + max(4, self.pool.capacity // 2))
        return self.pool.allocate()


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
        plan = self.rows.plan(self.lengths, keys.shape[2])
        if self.rows.pool is not None:
            self.arena.grow(self.rows.pool.capacity)
        for (_, side), new in zip(self.arena.sides, (keys, values), strict=False):
            packed = quantise(new, self.arena.quantisation)
            if plan.by_slices:
                side.write_slots(packed, plan.slots)
            else:
                side.write_scattered(packed, *plan.scatter)
        self.lengths = [length + plan.num_tokens for length in self.lengths]
        return Step(self.arena, plan)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[tuple[mx.array, ...], ...]:
        """mlx-lm's contract: update, then (data, scales, biases) of all keys and of all values, each [B, H_kv, T, ·].

        T covers whole blocks; `make_mask` masks what is beyond a row's length.
        """
        step = self.update(keys, values)
        return tuple(tuple(_rows(part) for part in side.gather(step.plan.block_ids)) for _, side in self.arena.sides)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """mlx-lm's contract: the mask for the next `N` tokens, bool [B, 1, N, T]."""
        if window_size not in (None, self.rows.window):
            raise BrokenInvariant(f"this cache's window is {self.rows.window}, the model asks for {window_size}")
        return self.rows.plan(self.lengths, N).mask[:, None]

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
        """One cache with all rows of `caches`, which must lie in one arena and are not to be used any more. Copies no KV."""
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
        """Row `index` as a cache of its own over the same slots. Copies no KV."""
        rows = RowBatch([self.rows.tables[index]], self.rows.window, self.rows.pool)
        return BatchQuantizedKVCache(self.arena, rows, [self.lengths[index]])

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep just these rows, in this order; the slots of the others go back to the pool."""
        kept = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        for index in set(range(len(self.lengths))) - set(kept):
            self._release(self.rows.tables[index])
        self.rows = RowBatch([self.rows.tables[i] for i in kept], self.rows.window, self.rows.pool)
        self.lengths = [self.lengths[i] for i in kept]

    def _release(self, table: BlockTable) -> None:
        if self.rows.pool is not None:
            for block_id in table.block_ids:
                self.rows.pool.release(block_id)

    def prepare(self, *, left_padding: object = None, lengths: object = None, right_padding: list[int] | None = None) -> None:
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
        """Exact contents of a row, [H_kv, length, ·] per side."""
        cache = self.extract(index)
        sides = zip((name for name, _ in self.arena.sides), cache.state, strict=True)
        start = StepPlan(cache.rows.tables, cache.lengths, 0, cache.rows.window).key_start
        return {name: Packed(*(part[0, :, : self.lengths[index] - start] for part in parts)) for name, parts in sides}

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every row; returns how many that were."""
        n = min(n, *self.lengths)
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
