"""What a step's rows read of a cache group, copied from block tables, which may change while the device computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE, FIRST_SEALED
from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant


class OpenBlock(NamedTuple):
    """Slot of a block in its open form, and its first position."""

    slot: int
    start: int


class RaggedBlocks:
    """Blocks of non-empty rows: those of all rows in slots `ids`, then each row's blocks in their open form.

    `starts`: first position of each of `ids`; `opened`: by row.
    """

    def __init__(
        self, ids: Sequence[Sequence[int]], starts: Sequence[int], opened: Sequence[Sequence[OpenBlock]] = ()
    ) -> None:
        in_open = [(row, block) for row, blocks in enumerate(opened) for block in blocks]
        rows = [row for row, blocks in enumerate(ids) for _ in blocks] + [row for row, _ in in_open]
        self.ids = mx.array([block_id for row in ids for block_id in row], dtype=mx.int32)
        self.open_ids = mx.array([block.slot for _, block in in_open], dtype=mx.int32) if in_open else None
        self.starts = [*starts, *(block.start for _, block in in_open)]
        self.rows = mx.array(rows, dtype=mx.int32)
        self._counts = [rows.count(row) for row in range(len(ids))] if in_open else [len(row) for row in ids]
        self._places = rows if in_open else None

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
        first_slot: of block 0 among open blocks, if queries of later blocks read it; else -1.

    `base` is at least 256 if open blocks have slots of their own.
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


class Part(NamedTuple):
    """Neighbouring blocks of one row in one form: in slots `ids`, int32 [n], from position `start` on.

    `span`: their places in `BlockReads.blocks`.
    """

    ids: mx.array
    span: slice
    start: int
    num_tokens: int
    is_open: bool = False


class BlockReads:
    """Blocks that rows read for `num_tokens` tokens each.

    Args:
        ids: slots by row, from block number `firsts` on.
        lengths: tokens of each row before these.
        open_slots: slot of each row's open block, which holds the tokens, or -1; empty if open blocks are among `ids`.
        first_slots: as `RowReads.first_slot`, by row; empty if block 0 is among `ids`.

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
        first_slots: Sequence[int] = (),
    ) -> None:
        self.num_tokens = num_tokens
        self.window = window
        self._ids = ids
        self._firsts = firsts
        self._lengths = lengths
        self.prepared: dict[Any, Any] = {}  # by kernels, for all layers
        self.begins_early = False
        self._open = open_slots
        self._first_slots = first_slots or [-1] * len(ids)

    @property
    def batch_size(self) -> int:
        return len(self._ids)

    @property
    def rows(self) -> list[RowReads]:
        rows = zip(self._ids, self._firsts, self._lengths, self._slots_by_row, self._first_slots, strict=True)
        return [RowReads(ids, first * BLOCK_SIZE, length, slots, slot) for ids, first, length, slots, slot in rows]

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
        return RaggedBlocks(self._ids, starts, self._opened)

    @property
    def _opened(self) -> list[list[OpenBlock]]:
        """Blocks that each row reads in their open form: block 0, then its own."""
        made = []
        for first, own, length in zip(self._first_slots, self._open, self._lengths, strict=False):
            blocks = OpenBlock(first, 0), OpenBlock(own, length // BLOCK_SIZE * BLOCK_SIZE)
            made.append([block for block in blocks if block.slot >= 0])
        return made

    @cached_property
    def parts(self) -> list[Part]:
        """Blocks of a single row, by position."""
        [ids], end, made = self._ids, self.key_start + self.num_keys, []
        if ids:
            num_tokens = min(len(ids) * BLOCK_SIZE, end - self.full_start)
            made.append(Part(self.blocks.ids, slice(0, len(ids)), self.full_start, num_tokens))
        for place, (slot, start) in enumerate(self._opened[0] if self._open else (), len(ids)):
            span, num_tokens = slice(place, place + 1), min(BLOCK_SIZE, end - start)
            made.append(Part(mx.array([slot], dtype=mx.int32), span, start, num_tokens, is_open=True))
        return sorted(made, key=lambda part: part.start)

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
        return self._key_starts[0]

    @property
    def _key_starts(self) -> list[int]:
        rows = zip(self._first_slots, self._firsts, self._lengths, strict=True)
        # A row's own block may be before those in `ids`: block 0.
        return [0 if slot >= 0 else min(first, length // BLOCK_SIZE) * BLOCK_SIZE for slot, first, length in rows]

    @property
    def full_start(self) -> int:
        """Position of a single row's first block in `ids`."""
        return self._firsts[0] * BLOCK_SIZE

    @property
    def num_keys(self) -> int:
        return self._lengths[0] + self.num_tokens - self.key_start

    @cached_property
    def mask(self) -> mx.array:
        """Keys that each query attends to, bool [B, num_tokens, blocks * 256]."""
        starts = mx.array(self._key_starts)[:, None, None]
        num_blocks = self.num_blocks + max(map(len, self._opened), default=0)
        keys = mx.arange(num_blocks * BLOCK_SIZE)[None, None, :] + starts
        queries = (mx.array(self._lengths)[:, None] + mx.arange(self.num_tokens)[None, :])[:, :, None]
        allowed = keys <= queries
        return allowed if self.window is None else allowed & (keys > queries - self.window)


def _reads_first(position: int, window: int | None) -> bool:
    """Whether a query reads block 0, and this is not its own."""
    return position >= BLOCK_SIZE and (window is None or position - window + 1 < BLOCK_SIZE)


def _first_slot(opened: BlockTable, length: int, end: int, window: int | None) -> int:
    """As `RowReads.first_slot`, of a step behind `length` tokens that ends in the block before `end`."""
    if end <= FIRST_SEALED or not _reads_first(max(length, FIRST_SEALED * BLOCK_SIZE), window):
        return -1
    if not opened.has_slot(0):
        raise BrokenInvariant("a step reads block 0, which has no slot")
    return opened.block_id(0)


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
        self._open_slots: list[list[int]] | None = None
        first_slots: list[int] = []
        if open_tables is not None:
            if min(before, default=FIRST_SEALED) < FIRST_SEALED:
                raise BrokenInvariant("a table of sealed blocks begins with a block that stays open")
            rows = list(zip(open_tables, lengths, ends, strict=True))
            self._open_slots = [table.slots_of(range(length // BLOCK_SIZE, end)) for table, length, end in rows]
            first_slots = [_first_slot(table, length, end, window) for table, length, end in rows]
        super().__init__(ids, firsts, lengths, num_tokens, window, first_slots=first_slots)

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
            first_slots=[self._first_slots[row] for row in rows],
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
        lengths = [length + start for length in self._lengths]
        ids, firsts, open_slots, first_slots = [], [], [], []
        rows = zip(self._ids, self._firsts, self._lengths, self._open_slots, self._first_slots, strict=True)
        for (row_ids, first, before, slots, first_slot), length in zip(rows, lengths, strict=True):
            own, begin = length // BLOCK_SIZE, first
            if self.window is not None:
                begin = max(first, (length - self.window + 1) // BLOCK_SIZE)
            slot = slots[own - before // BLOCK_SIZE]
            ids.append(row_ids[begin - first : max(own, begin) - first + (slot < 0)])
            firsts.append(begin)
            open_slots.append(slot)
            first_slots.append(first_slot if _reads_first(length, self.window) else -1)
        return BlockReads(ids, firsts, lengths, stop - start, self.window, open_slots, first_slots)

    @cached_property
    def full_ids(self) -> mx.array:
        """Slots of full blocks that a single row reads in some segment, int32 [n]."""
        assert self._open_slots is not None
        ids = self._ids[0]
        return mx.array(ids[:-1] if self._open_slots[0][-1] >= 0 else ids, dtype=mx.int32)
