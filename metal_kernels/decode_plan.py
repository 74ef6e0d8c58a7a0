"""Tokens that each query of a step reads, as inputs of the decode kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.metal_kernels.numbers import ints, one_a_thread
from agentcache.metal_kernels.tiling import HeadShape, own_tiling, shared_tiling

MAX_SPLITS = 32  # per group; best on an H100
_NO_WINDOW = 1 << 30
_WIDTHS = 16


class Table(NamedTuple):
    """Slots of the blocks that a row reads, from position `base` on.

    `first_is_open`: whether the first is block 0, in its slot among the open blocks.
    """

    block_ids: Sequence[int]
    base: int
    first_is_open: bool = False


@dataclass(frozen=True)
class Span:
    """A group: queries (row * num_tokens + token) that read the same tokens, `begin … end-1`, of a block table.

    Args:
        base: position of the table's first block.
        open_slot: slot of the queries' own block, which is then not read from the table; -1 if there is none.
        first_is_open: whether the table's first block is block 0 in its open form, and not the queries' own.
    """

    block_ids: tuple[int, ...]
    base: int
    begin: int
    end: int
    members: tuple[int, ...]
    open_slot: int = -1
    first_is_open: bool = False

    @property
    def sealed_begin(self) -> int:
        """Position of the first token that is read from a full block."""
        return BLOCK_SIZE if self.first_is_open else self.begin


class Groups:
    """Groups of one launch, padded to `size` members; tables are at least `num_blocks` wide."""

    def __init__(self, spans: Sequence[Span], size: int, num_blocks: int = 1) -> None:
        self.spans = tuple(spans)
        self.size = size
        # Rounded up: each width is traced separately.
        self.width = -(-max(num_blocks, *(len(span.block_ids) for span in spans)) // _WIDTHS) * _WIDTHS
        self.longest = max(span.end - span.begin for span in spans)

    @cached_property
    def table(self) -> mx.array:
        """Slots, int32 [groups, width]."""
        tables = (span.block_ids for span in self.spans)
        return ints(tuple(ids + (ids[:1] or (0,)) * (self.width - len(ids)) for ids in tables))

    @cached_property
    def bounds(self) -> mx.array:
        """base, begin, end, open slot and `sealed_begin`, int32 [groups, 5]."""
        spans = self.spans
        return ints(tuple((span.base, span.begin, span.end, span.open_slot, span.sealed_begin) for span in spans))

    @cached_property
    def members(self) -> mx.array:
        """Queries, int32 [groups, size]; padded with -1."""
        return ints(tuple(span.members + (-1,) * (self.size - len(span.members)) for span in self.spans))

    def places(self, num_queries: int) -> list[int]:
        """group * size + member of each query, or -1."""
        places = [-1] * num_queries
        for index, span in enumerate(self.spans):
            for member, query in enumerate(span.members):
                places[query] = index * self.size + member
        return places

    def splits(self, kv_heads: int, tokens_a_round: int, threadgroups: int) -> int:
        """Number of splits that fills the device without making them too short."""
        wanted = -(-threadgroups // (len(self.spans) * kv_heads))
        return max(1, min(wanted, MAX_SPLITS, -(-self.longest // tokens_a_round)))


@dataclass(frozen=True)
class StepRows:
    """Block tables of a step's rows, whose last `num_tokens` tokens are the queries.

    Args:
        bases: position of each row's first block.
        lengths: tokens before the step.
        window: latest tokens attended to; None for all.
        residual_ids: slots of residuals of all blocks that a row reads, in their order.
        open_ids: slots of open blocks, from the block of a row's first query; -1 for one that is read when full. () if
            queries read their own blocks from `block_ids`, else these need no own blocks that are open.
        first_ids: slots of block 0 among the open blocks, by row, for queries of later blocks; -1 if these do not read
            it. `block_ids` then begin with block 1 or later. () if block 0 is read from `block_ids`.
    """

    block_ids: Sequence[Sequence[int]]
    bases: Sequence[int]
    lengths: Sequence[int]
    num_tokens: int
    window: int | None = None
    residual_ids: Sequence[Sequence[int]] = ()
    open_ids: Sequence[Sequence[int]] = ()
    first_ids: Sequence[int] = ()

    @cached_property
    def tables(self) -> list[Table]:
        return [self._table(row) for row in range(len(self.lengths))]

    @property
    def residual_tables(self) -> list[Table]:
        """`tables` with the residuals' slots."""
        pairs = zip(self.tables, self.residual_ids, strict=True)
        return [table._replace(block_ids=ids) for table, ids in pairs]

    def _table(self, row: int) -> Table:
        ids, first = self.block_ids[row], -1
        if self.first_ids:
            first = self.open_ids[row][0] if self.lengths[row] < BLOCK_SIZE else self.first_ids[row]
            assert first < 0 or not ids or self.bases[row] == BLOCK_SIZE
        return Table(ids, self.bases[row]) if first < 0 else Table((first, *ids), 0, first_is_open=True)

    def queries_of(self, row: int) -> list[int]:
        return list(range(row * self.num_tokens, (row + 1) * self.num_tokens))

    def runs_of(self, row: int, size: int) -> Iterator[range]:
        """Up to `size` of a row's new tokens at a time; of one block if there are open ones."""
        length, at = self.lengths[row], 0
        while at < self.num_tokens:
            left = BLOCK_SIZE - (length + at) % BLOCK_SIZE if self.open_ids else size
            run = range(at, min(at + min(size, left), self.num_tokens))
            yield run
            at = run.stop

    def open_slot_of(self, row: int, position: int) -> int:
        if not self.open_ids:
            return -1
        return self.open_ids[row][position // BLOCK_SIZE - self.lengths[row] // BLOCK_SIZE]


class DecodePlan:
    """A step's reads, for all layers of a cache group and all shapes with the same `Tiling`s.

    `least_saved`: tokens that justify the launch for a shared prefix. `beside`: `own` with residuals' slots.
    """

    def __init__(self, shape: HeadShape, rows: StepRows, least_saved: int = 2048) -> None:
        self.rows = rows
        self.window = _NO_WINDOW if rows.window is None else rows.window
        # Residuals differ by row: each reads all of its tokens itself.
        is_own = rows.window is not None or rows.residual_ids
        prefixes = [] if is_own else shared_prefixes(rows, least_saved)
        members = own_tiling(shape, rows.num_tokens).members
        # Both tables of a launch are equally wide.
        num_blocks = max(map(len, rows.residual_ids), default=1)
        self.own = Groups(*own_spans(rows, rows.tables, prefixes, members), num_blocks)
        self.beside = None
        if rows.residual_ids:
            self.beside = Groups(*own_spans(rows, rows.residual_tables, (), members), self.own.width)
        self.shared = Groups(*shared_spans(rows, prefixes, shared_tiling(shape).members)) if prefixes else None
        self.launches: dict[Any, Any] = {}

    @cached_property
    def positions(self) -> mx.array:
        """Positions of the queries, int32 [rows * num_tokens]."""
        return ints(tuple(length + token for length in self.rows.lengths for token in range(self.rows.num_tokens)))

    @cached_property
    def places(self) -> mx.array:
        """`Groups.places` in `own` and `shared`, int32 [rows * num_tokens, 2]."""
        count = len(self.rows.lengths) * self.rows.num_tokens
        shared = [-1] * count if self.shared is None else self.shared.places(count)
        return ints(tuple(zip(self.own.places(count), shared, strict=True)))


@one_a_thread
def no_sinks() -> mx.array:
    return mx.zeros(1)


@one_a_thread
def nothing_written() -> mx.array:
    """Placeholder if no `append` is in the same graph."""
    return mx.zeros(1, mx.int32)


@dataclass(frozen=True)
class Prefix:
    rows: tuple[int, ...]
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE


def shared_prefixes(rows: StepRows, least_saved: int) -> list[Prefix]:
    """Rows' common prefixes, without last blocks: each row needs tokens of its own."""
    by_first: dict[tuple[int, bool], list[int]] = {}
    for row, (table, length) in enumerate(zip(rows.tables, rows.lengths, strict=True)):
        if table.base == 0 and length >= BLOCK_SIZE:
            by_first.setdefault((table.block_ids[0], table.first_is_open), []).append(row)
    before = [table.block_ids[: length // BLOCK_SIZE] for table, length in zip(rows.tables, rows.lengths, strict=True)]
    prefixes = [
        Prefix(tuple(alike), _common_blocks([before[row] for row in alike]))
        for alike in by_first.values()
        if len(alike) > 1
    ]
    return [prefix for prefix in prefixes if (len(prefix.rows) - 1) * prefix.num_tokens >= least_saved]


def _common_blocks(tables: Sequence[Sequence[int]]) -> int:
    most = min(len(ids) for ids in tables)
    first = tables[0]
    return next((i for i in range(most) if any(ids[i] != first[i] for ids in tables)), most)


def shared_spans(rows: StepRows, prefixes: Sequence[Prefix], size: int) -> tuple[list[Span], int]:
    """Groups of up to `size` queries that share a prefix, and `size`."""
    spans = []
    for prefix in prefixes:
        queries = [query for row in prefix.rows for query in rows.queries_of(row)]
        ids, base, first_is_open = rows.tables[prefix.rows[0]]
        read = Span(tuple(ids[: prefix.num_blocks]), base, base, prefix.num_tokens, (), first_is_open=first_is_open)
        spans += [replace(read, members=tuple(queries[at : at + size])) for at in range(0, len(queries), size)]
    return spans, size


def own_spans(rows: StepRows, tables: Sequence[Table], prefixes: Sequence[Prefix], size: int) -> tuple[list[Span], int]:
    """Groups of up to `size` queries of a row, over tokens of `tables` outside `prefixes`, and `size`."""
    read = {row: prefix.num_tokens for prefix in prefixes for row in prefix.rows}
    spans = []
    for row, ((ids, base, first_is_open), length) in enumerate(zip(tables, rows.lengths, strict=True)):
        for run in rows.runs_of(row, size):
            queries = rows.queries_of(row)[run.start : run.stop]
            oldest = 0 if rows.window is None else length + run.start - rows.window + 1
            begin, end = max(base, read.get(row, 0), oldest), length + run.stop
            skipped = (begin - base) // BLOCK_SIZE
            open_slot = rows.open_slot_of(row, end - 1)
            at = base + skipped * BLOCK_SIZE
            reads_first = first_is_open and begin < BLOCK_SIZE < end
            spans.append(Span(tuple(ids[skipped:]), at, begin, end, tuple(queries), open_slot, reads_first))
    return spans, size
