"""Where one step writes and reads: block tables turned into slots, places and masks.

Computed once per step and shared by all layers of a cache group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockPool, BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.arena import Slot

_MAX_SLICES = 16  # beyond this many runs one scatter is cheaper than slice assignments


class RaggedBlocks:
    """Blocks of several rows, one row after the other, and sums over each row's own.

    Args:
        ids: each row's slots; no row is empty.
        starts: position of each block's first token in its sequence, in the order of `ids`.
    """

    def __init__(self, ids: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        self.ids = mx.array([block_id for row in ids for block_id in row], dtype=mx.int32)
        self.starts = starts
        self.rows = mx.array([row for row, blocks in enumerate(ids) for _ in blocks], dtype=mx.int32)
        self._counts = [len(row) for row in ids]

    @cached_property
    def _places(self) -> mx.array:
        """Index of each row's blocks, int32 [B, most blocks of a row]; a shorter row repeats its first one."""
        most, begin, places = max(self._counts), 0, []
        for count in self._counts:
            places.append([*range(begin, begin + count), *[begin] * (most - count)])
            begin += count
        return mx.array(places, dtype=mx.int32)

    @cached_property
    def _real(self) -> mx.array:
        """Which of `_places` are no repetition, bool [B, most blocks of a row]."""
        return mx.arange(max(self._counts))[None] < mx.array(self._counts)[:, None]

    def spread(self, x: mx.array) -> mx.array:
        """[B, ...] to [num_blocks, ...]: every block gets its row's."""
        return mx.broadcast_to(x, (self.rows.size, *x.shape[1:])) if len(self._counts) == 1 else x[self.rows]

    def max(self, x: mx.array) -> mx.array:
        """[num_blocks, ...] to the maximum over each row's blocks, [B, ...]."""
        return x.max(axis=0, keepdims=True) if len(self._counts) == 1 else x[self._places].max(axis=1)

    def sum(self, x: mx.array) -> mx.array:
        """[num_blocks, ...] to the sum over each row's blocks, [B, ...]; no atomics, so the same in every run."""
        if len(self._counts) == 1:
            return x.sum(axis=0, keepdims=True)
        real = self._real.reshape(*self._real.shape, *[1] * (x.ndim - 1))
        return mx.where(real, x[self._places], 0).sum(axis=1)


class StepPlan:
    """Where one step of `num_tokens` tokens a row is written and read; the same for all layers of a group.

    Args:
        tables: the rows' block tables, already long enough.
        lengths: tokens each row holds before the step.
        num_tokens: tokens added to every row.
        window: number of most recent tokens attended to; None for all.
    """

    def __init__(
        self, tables: Sequence[BlockTable], lengths: Sequence[int], num_tokens: int, window: int | None
    ) -> None:
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
            filler = ids[0] if ids else 0  # a row without tokens has no block of its own
            rows.append(ids + [filler] * (self.num_blocks - len(ids)))
        return mx.array(rows, dtype=mx.int32)

    @cached_property
    def blocks(self) -> RaggedBlocks:
        """The same blocks one row after the other, without fillers."""
        tables = zip(self._tables, self._firsts, self._lasts, strict=True)
        ids = [table.block_ids[first - table.first_block : last - table.first_block] for table, first, last in tables]
        starts = [
            (first + i) * BLOCK_SIZE for first, row in zip(self._firsts, ids, strict=True) for i in range(len(row))
        ]
        return RaggedBlocks(ids, starts)

    @cached_property
    def block_mask(self) -> mx.array:
        """Which keys of each of `blocks` its row's queries attend to, bool [num_blocks, num_tokens, 256]."""
        starts, rows = mx.array(self.blocks.starts)[:, None, None], self.blocks.rows
        keys = starts + mx.arange(BLOCK_SIZE)[None, None, :]
        queries = (mx.array(self._lengths)[rows][:, None] + mx.arange(self.num_tokens)[None, :])[:, :, None]
        allowed = keys <= queries
        return allowed if self.window is None else allowed & (keys > queries - self.window)

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
                table.block_ids.append(self.allocate())

    def shared_blocks(self, lengths: Sequence[int], num_tokens: int) -> list[tuple[BlockTable, int]]:
        """Blocks (table, position) that the next `num_tokens` tokens of each row go to and others also refer to."""
        if self.pool is None:
            return []  # whoever reserved the blocks beforehand has seen to that
        return [
            (table, position)
            for table, length in zip(self.tables, lengths, strict=True)
            for position in range(length // BLOCK_SIZE, min(-(-(length + num_tokens) // BLOCK_SIZE), table.end_block))
            if self.pool.ref_cnt(table.block_id(position)) > 1
        ]

    def replace(self, table: BlockTable, position: int, block_id: int) -> None:
        """Put slot `block_id` in the place of the table's block number `position`, and let go of the old one."""
        self.release([table.block_id(position)])
        table.replace(position, block_id)
        self._plan = None

    def retain(self, block_ids: Sequence[int]) -> None:
        """One more reference to each, where the slots are this batch's to count."""
        if self.pool is not None:
            for block_id in block_ids:
                self.pool.retain(block_id)

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less to each, where the slots are this batch's to count."""
        if self.pool is not None:
            for block_id in block_ids:
                self.pool.release(block_id)

    def allocate(self) -> int:
        """A slot of the pool, which grows as needed."""
        if self.pool is None:
            raise BrokenInvariant("a step was run without reserving its blocks")
        if not self.pool.num_free:
            self.pool.grow(self.pool.capacity + max(4, self.pool.capacity // 2))
        return self.pool.allocate()
