"""What a step's rows read of a cache group, copied from block tables, which may change while the device computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant


class RaggedBlocks:
    """Blocks of non-empty rows: those of all rows in slots `ids`, then each row's open block.

    `starts`: first position of each of `ids`; `open_slots`: by row, with first positions `open_starts`, or -1.
    """

    def __init__(
        self,
        ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        open_slots: Sequence[int] = (),
        open_starts: Sequence[int] = (),
    ) -> None:
        with_open = [row for row, slot in enumerate(open_slots) if slot >= 0]
        rows = [row for row, blocks in enumerate(ids) for _ in blocks] + with_open
        self.ids = mx.array([block_id for row in ids for block_id in row], dtype=mx.int32)
        self.open_ids = mx.array([open_slots[row] for row in with_open], dtype=mx.int32) if with_open else None
        self.starts = [*starts, *(open_starts[row] for row in with_open)]
        self.rows = mx.array(rows, dtype=mx.int32)
        self._counts = [rows.count(row) for row in range(len(ids))] if with_open else [len(row) for row in ids]
        self._places = rows if with_open else None

    @cached_property
    def _indices(self) -> mx.array:
        most, indices = max(self._counts), []
        for row, own in enumerate(self.of_rows):
            indices.append([*own, *[own[0]] * (most - self._counts[row])])
        return mx.array(indices, dtype=mx.int32)  # [B, longest row]

    @cached_property
    def of_rows(self) -> list[list[int]]:
        """Indices of each row's blocks, in their order."""
        if self._places is None:
            ends = list(accumulate(self._counts, initial=0))
            return [list(range(begin, end)) for begin, end in pairwise(ends)]
        own: list[list[int]] = [[] for _ in self._counts]
        for index, row in enumerate(self._places):
            own[row].append(index)
        return own

    @cached_property
    def _real(self) -> mx.array:
        return mx.arange(max(self._counts))[None] < mx.array(self._counts)[:, None]

    def spread(self, x: mx.array) -> mx.array:
        """Repeat rows for their blocks: [B, ...] to [num_blocks, ...]."""
        return mx.broadcast_to(x, (self.rows.size, *x.shape[1:])) if len(self._counts) == 1 else x[self.rows]

    def max(self, x: mx.array) -> mx.array:
        """Maximum per row: [num_blocks, ...] to [B, ...]."""
        return x.max(axis=0, keepdims=True) if len(self._counts) == 1 else x[self._indices].max(axis=1)

    def sum(self, x: mx.array) -> mx.array:
        """Sum per row, as `max`. Deterministic: no atomics."""
        if len(self._counts) == 1:
            return x.sum(axis=0, keepdims=True)
        real = self._real.reshape(*self._real.shape, *[1] * (x.ndim - 1))
        return mx.where(real, x[self._indices], 0).sum(axis=1)


@dataclass(frozen=True)
class RowReads:
    """One row's reads, from position `base` on; `length` before the step.

    Args:
        open_slots: of the blocks that the step's tokens are in, if open blocks have slots of their own; -1 for a block
            that is read when full.
        first_slot: of block 0 among open blocks, if queries of later blocks read it; then `base` is at least 256.
            Else -1.
    """

    block_ids: Sequence[int]
    base: int
    length: int
    open_slots: Sequence[int] = ()
    first_slot: int = -1

    def slot_of(self, block: int) -> tuple[int, bool]:
        """Slot of one of the blocks that the step's tokens are in, and whether it is an open one."""
        index = block - self.length // BLOCK_SIZE
        if index < len(self.open_slots) and self.open_slots[index] >= 0:
            return self.open_slots[index], True
        return self.block_ids[block - self.base // BLOCK_SIZE], False


class BlockReads:
    """Blocks that rows read for `num_tokens` tokens each.

    Args:
        ids: slots by row, from block number `firsts` on.
        lengths: tokens of each row before these.
        open_slots: slot of each row's open block, which holds the tokens, or -1; empty if open blocks are among `ids`.

    `begins_early`: the device may start before the step is built; not if the step assigns to an arena.
    """

    def __init__(
        self,
        ids: Sequence[list[int]],
        firsts: Sequence[int],
        lengths: Sequence[int],
        num_tokens: int,
        window: int | None,
        open_slots: Sequence[int] = (),
    ) -> None:
        self.num_tokens = num_tokens
        self.window = window
        self._ids = ids
        self._firsts = firsts
        self._lengths = lengths
        self.prepared: dict[Any, Any] = {}  # by kernels, for all layers
        self.begins_early = False
        self._open = open_slots

    @property
    def open_end(self) -> int:
        """Tokens before a single row's open block, from `key_start` on."""
        return self._lengths[0] // BLOCK_SIZE * BLOCK_SIZE - self.key_start

    @property
    def batch_size(self) -> int:
        return len(self._ids)

    @property
    def rows(self) -> list[RowReads]:
        rows = zip(self._ids, self._firsts, self._lengths, self._slots_by_row, strict=True)
        return [RowReads(ids, first * BLOCK_SIZE, length, slots) for ids, first, length, slots in rows]

    @property
    def _slots_by_row(self) -> Sequence[Sequence[int]]:
        return [(slot,) for slot in self._open] if self._open else [()] * len(self._ids)

    @cached_property
    def num_blocks(self) -> int:
        return max(len(ids) for ids in self._ids)

    @cached_property
    def block_ids(self) -> mx.array:
        """Slots to read, int32 [B, num_blocks]."""
        # An empty row has no block to repeat.
        rows = [ids + [ids[0] if ids else 0] * (self.num_blocks - len(ids)) for ids in self._ids]
        return mx.array(rows, dtype=mx.int32)

    @cached_property
    def blocks(self) -> RaggedBlocks:
        rows = zip(self._firsts, self._ids, strict=True)
        starts = [(first + i) * BLOCK_SIZE for first, ids in rows for i in range(len(ids))]
        open_starts = [length // BLOCK_SIZE * BLOCK_SIZE for length in self._lengths]
        return RaggedBlocks(self._ids, starts, self._open, open_starts)

    @cached_property
    def block_mask(self) -> mx.array:
        """`mask` for each of `blocks`, bool [num_blocks, num_tokens, 256]."""
        starts, rows = mx.array(self.blocks.starts)[:, None, None], self.blocks.rows
        keys = starts + mx.arange(BLOCK_SIZE)[None, None, :]
        queries = (mx.array(self._lengths)[rows][:, None] + mx.arange(self.num_tokens)[None, :])[:, :, None]
        allowed = keys <= queries
        return allowed if self.window is None else allowed & (keys > queries - self.window)

    @cached_property
    def block_bias(self) -> mx.array:
        """`block_mask` as 0 or -inf, float32 [num_blocks, 1, 1, num_tokens, 256]."""
        return mx.where(self.block_mask, 0.0, -mx.inf)[:, None, None]

    @property
    def key_start(self) -> int:
        """Position of a single row's first key."""
        return self._firsts[0] * BLOCK_SIZE

    @property
    def num_keys(self) -> int:
        return self._lengths[0] + self.num_tokens - self.key_start

    @cached_property
    def mask(self) -> mx.array:
        """Keys that each query attends to, bool [B, num_tokens, blocks * 256]."""
        starts = mx.array([first * BLOCK_SIZE for first in self._firsts])[:, None, None]
        num_blocks = self.num_blocks + any(slot >= 0 for slot in self._open)
        keys = mx.arange(num_blocks * BLOCK_SIZE)[None, None, :] + starts
        queries = (mx.array(self._lengths)[:, None] + mx.arange(self.num_tokens)[None, :])[:, :, None]
        allowed = keys <= queries
        return allowed if self.window is None else allowed & (keys > queries - self.window)


class Segment(NamedTuple):
    """Tokens `start … stop - 1` of a step, which are in one block of each row."""

    start: int
    stop: int
    reads: BlockReads


class Reads(BlockReads):
    """Blocks of one group that a step's rows read, with those of its own tokens.

    `lengths`: tokens of each row before the step, which adds `num_tokens`. `open_tables`: of open blocks, if they
    are in another group; then attention computes `segments` one by one.
    """

    def __init__(
        self,
        tables: Sequence[BlockTable],
        lengths: Sequence[int],
        num_tokens: int,
        window: int | None,
        open_tables: Sequence[BlockTable] | None = None,
    ) -> None:
        # Lists, for speed.
        before = [table.first_block for table in tables]
        ends = [-(-(length + num_tokens) // BLOCK_SIZE) for length in lengths]
        firsts = before
        if window is not None:
            needed = [max(0, length - window + 1) // BLOCK_SIZE for length in lengths]
            firsts = [max(pair) for pair in zip(needed, before, strict=True)]
        ids = [
            table.block_ids[begin - first : end - first]
            for table, first, begin, end in zip(tables, before, firsts, ends, strict=True)
        ]
        super().__init__(ids, firsts, lengths, num_tokens, window)
        self._open_slots: list[list[int]] | None = None
        if open_tables is not None:
            self._open_slots = [
                [table.block_id(at) if table.has(at) else -1 for at in range(length // BLOCK_SIZE, end)]
                for table, length, end in zip(open_tables, lengths, ends, strict=True)
            ]

    def of_rows(self, rows: Sequence[int]) -> Reads:
        part = Reads.__new__(Reads)
        lengths = [self._lengths[row] for row in rows]
        BlockReads.__init__(
            part,
            [self._ids[row] for row in rows],
            [self._firsts[row] for row in rows],
            lengths,
            self.num_tokens,
            self.window,
        )
        part._open_slots = None if self._open_slots is None else [self._open_slots[row] for row in rows]
        return part

    @property
    def in_segments(self) -> bool:
        return self._open_slots is not None

    @property
    def _slots_by_row(self) -> Sequence[Sequence[int]]:
        return super()._slots_by_row if self._open_slots is None else self._open_slots

    @cached_property
    def segments(self) -> list[Segment]:
        """The step's tokens, cut where rows reach another block. Raises BrokenInvariant if they do so apart."""
        if self.num_tokens == 1:
            return [Segment(0, 1, self._within(0, 1))]
        offsets = {length % BLOCK_SIZE for length in self._lengths}
        cuts = range(BLOCK_SIZE - max(offsets), self.num_tokens, BLOCK_SIZE)
        if cuts and len(offsets) > 1:
            raise BrokenInvariant("rows of one step reach the next block at different tokens")
        ends = pairwise([0, *cuts, self.num_tokens])
        return [Segment(start, stop, self._within(start, stop)) for start, stop in ends]

    def _within(self, start: int, stop: int) -> BlockReads:
        assert self._open_slots is not None
        ids, firsts, open_slots = [], [], []
        for row_ids, first, length, slots in zip(self._ids, self._firsts, self._lengths, self._open_slots, strict=True):
            own, begin = (length + start) // BLOCK_SIZE, first
            if self.window is not None:
                begin = max(first, (length + start - self.window + 1) // BLOCK_SIZE)
            slot = slots[own - length // BLOCK_SIZE]
            ids.append(row_ids[begin - first : own - first + (slot < 0)])
            firsts.append(begin)
            open_slots.append(slot)
        lengths = [length + start for length in self._lengths]
        return BlockReads(ids, firsts, lengths, stop - start, self.window, open_slots)

    @cached_property
    def full_ids(self) -> mx.array:
        """Slots of full blocks that a single row reads in some segment, int32 [n]."""
        assert self._open_slots is not None
        ids = self._ids[0]
        return mx.array(ids[:-1] if self._open_slots[0][-1] >= 0 else ids, dtype=mx.int32)
