"""Which queries read which tokens: every visible token once, whatever is shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentcache.metal_kernels.decode_plan import MAX_SPLITS, DecodePlan, Groups, StepRows
from agentcache.metal_kernels.tiling import HeadShape, own_tiling, shared_tiling

BLOCK = 256


@st.composite
def steps(draw: st.DrawFn) -> tuple[HeadShape, StepRows, int]:
    """Rows that descend from a few prefixes, in slots of their own or shared ones."""
    num_tokens = draw(st.integers(1, 8))
    window = draw(st.none() | st.integers(1, 700))
    prefixes = [tuple(range(1000 * n, 1000 * n + draw(st.integers(1, 4)))) for n in range(3)]
    ids, bases, lengths = [], [], []
    for row in range(draw(st.integers(1, 6))):
        prefix = draw(st.sampled_from([(), *prefixes]))
        length = len(prefix) * BLOCK + draw(st.integers(0, 600))
        count = -(-(length + num_tokens) // BLOCK)
        table = [*prefix, *range(10_000 * (row + 1), 10_000 * (row + 1) + count)][:count]
        first = 0 if window is None else max(0, length - window + 1) // BLOCK
        ids.append(table[first:])
        bases.append(first * BLOCK)
        lengths.append(length)
    gqa = draw(st.integers(1, 16))
    shape = HeadShape(draw(st.sampled_from([64, 96, 256])), 2, gqa, 32, draw(st.sampled_from([mx.float16, mx.float32])))
    return shape, StepRows(ids, bases, lengths, num_tokens, window), draw(st.sampled_from([1, 2048]))


def slots_read(groups: Groups | None, plan: DecodePlan, query: int) -> Counter[tuple[int, int]]:
    """(slot, place in it) of every token that a query attends to in these groups."""
    seen: Counter[tuple[int, int]] = Counter()
    position = plan.positions.tolist()[query]
    for span in groups.spans if groups else ():
        if query in span.members:
            tokens = range(max(span.begin, position - plan.window + 1), min(span.end, position + 1))
            seen.update((span.block_ids[(t - span.base) // BLOCK], t % BLOCK) for t in tokens)
    return seen


@given(steps())
def test_every_query_reads_every_visible_token_once(step: tuple[HeadShape, StepRows, int]) -> None:
    shape, rows, least_saved = step
    plan = DecodePlan(shape, rows, least_saved)
    for row, (ids, base, length) in enumerate(zip(rows.block_ids, rows.bases, rows.lengths, strict=True)):
        for token, query in enumerate(rows.queries_of(row)):
            begin = 0 if rows.window is None else max(0, length + token - rows.window + 1)
            visible = range(begin, length + token + 1)
            expected = Counter((ids[(t - base) // BLOCK], t % BLOCK) for t in visible)
            assert slots_read(plan.own, plan, query) + slots_read(plan.shared, plan, query) == expected


@given(steps())
def test_the_arrays_say_what_the_groups_are(step: tuple[HeadShape, StepRows, int]) -> None:
    shape, rows, least_saved = step
    plan = DecodePlan(shape, rows, least_saved)
    places = np.array(plan.places)
    for column, groups in enumerate((plan.own, plan.shared)):
        if groups is None:
            assert (places[:, column] == -1).all()
            continue
        members = np.array(groups.members).reshape(-1)
        for query, place in enumerate(places[:, column]):
            assert members[place] == query if place >= 0 else query not in members
        for span, table, bounds in zip(groups.spans, np.array(groups.table), np.array(groups.bounds), strict=True):
            assert tuple(table[: len(span.block_ids)]) == span.block_ids
            assert tuple(bounds) == (span.base, span.begin, span.end, span.open_slot, span.sealed_begin)
            assert span.begin < span.end <= span.base + len(span.block_ids) * BLOCK
            assert span.base <= span.begin < span.base + BLOCK


@given(steps(), st.integers(1, 4096))
def test_splits_are_within_what_the_merge_takes(step: tuple[HeadShape, StepRows, int], threadgroups: int) -> None:
    shape, rows, least_saved = step
    plan = DecodePlan(shape, rows, least_saved)
    assert 1 <= plan.own.splits(shape.kv_heads, 16, threadgroups) <= MAX_SPLITS


@st.composite
def steps_with_open_blocks(draw: st.DrawFn) -> tuple[HeadShape, StepRows, int]:
    """As `steps`; tables end at any block from the last one's predecessor on, and queries may reach a second block."""
    shape, rows, least_saved = draw(steps())
    num_tokens = draw(st.integers(1, 32))
    ids, opened = [], []
    for row, (table, base, length) in enumerate(zip(rows.block_ids, rows.bases, rows.lengths, strict=True)):
        first, last = length // BLOCK, (length + num_tokens - 1) // BLOCK
        longer = [*table, 10_000 * (row + 1) + 5000]
        ids.append(longer[: last - base // BLOCK + draw(st.integers(0, 1))])
        opened.append([100_000 * (row + 1) + block for block in range(last - first + 1)])
    shape = replace(shape, by_channel=True)
    residual_ids = [[1 + slot for slot in [*table, 0]] for table in rows.block_ids] if draw(st.booleans()) else ()
    return (
        shape,
        replace(rows, block_ids=ids, num_tokens=num_tokens, open_ids=opened, residual_ids=residual_ids),
        least_saved,
    )


@st.composite
def steps_with_first_blocks(draw: st.DrawFn) -> tuple[HeadShape, StepRows, int]:
    """As `steps_with_open_blocks`, with block 0 in its open form: the same slot for rows with the same prefix."""
    shape, rows, least_saved = draw(steps_with_open_blocks())
    ids, bases, first_ids = [], [], []
    for table, base, length, opened in zip(rows.block_ids, rows.bases, rows.lengths, rows.open_ids, strict=True):
        has_first = base == 0 and len(table) > 0 and (length >= BLOCK or len(opened) > 1)
        ids.append(table[1:] if base == 0 else table)
        bases.append(max(base, BLOCK))
        first_ids.append((opened[0] if length < BLOCK else 1_000_000 + table[0]) if has_first else -1)
    return shape, replace(rows, block_ids=ids, bases=bases, first_ids=first_ids), least_saved


# Form, slot, and the tokens that are read there.
Part = tuple[str, int, int, int]


def parts_of(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Tokens `begin … end-1`, block by block: the block, and the tokens in it."""
    for block in range(begin // BLOCK, -(-end // BLOCK)):
        yield block, max(begin - block * BLOCK, 0), min(end - block * BLOCK, BLOCK)


def read_by_form(groups: Groups | None, plan: DecodePlan, query: int) -> Counter[Part]:
    """Parts of blocks that a query attends to in these groups: as the kernel does."""
    seen: Counter[Part] = Counter()
    position = plan.positions.tolist()[query]
    for span in groups.spans if groups else ():
        if query in span.members:
            opens = span.end if span.open_slot < 0 else (span.end - 1) // BLOCK * BLOCK
            for block, *tokens in parts_of(max(span.begin, position - plan.window + 1), min(span.end, position + 1)):
                t = block * BLOCK + tokens[0]
                full = span.sealed_begin <= t < opens
                slot = span.block_ids[block - span.base // BLOCK] if t < opens else span.open_slot
                seen["full" if full else "open", slot, tokens[0], tokens[1]] += 1
    return seen


@given(steps_with_open_blocks())
def test_every_query_reads_its_own_block_from_the_open_one(step: tuple[HeadShape, StepRows, int]) -> None:
    shape, rows, least_saved = step
    plan = DecodePlan(shape, rows, least_saved)
    for row, (ids, base, length) in enumerate(zip(rows.block_ids, rows.bases, rows.lengths, strict=True)):
        for token, query in enumerate(rows.queries_of(row)):
            q = length + token
            expected: Counter[Part] = Counter()
            for block, begin, end in parts_of(0 if rows.window is None else max(0, q - rows.window + 1), q + 1):
                own = block == q // BLOCK
                slot = rows.open_ids[row][q // BLOCK - length // BLOCK] if own else ids[block - base // BLOCK]
                expected["open" if own else "full", slot, begin, end] += 1
            assert read_by_form(plan.own, plan, query) + read_by_form(plan.shared, plan, query) == expected


@given(steps_with_first_blocks())
def test_every_query_reads_block_0_in_its_open_form(step: tuple[HeadShape, StepRows, int]) -> None:
    shape, rows, least_saved = step
    plan = DecodePlan(shape, rows, least_saved)
    for row, (ids, base, length) in enumerate(zip(rows.block_ids, rows.bases, rows.lengths, strict=True)):
        for token, query in enumerate(rows.queries_of(row)):
            q = length + token
            expected: Counter[Part] = Counter()
            for block, begin, end in parts_of(0 if rows.window is None else max(0, q - rows.window + 1), q + 1):
                if block == q // BLOCK:
                    form, slot = "open", rows.open_ids[row][block - length // BLOCK]
                elif block == 0:
                    form, slot = "open", rows.first_ids[row]
                else:
                    form, slot = "full", ids[block - max(base // BLOCK, 1)]
                expected[form, slot, begin, end] += 1
            assert read_by_form(plan.own, plan, query) + read_by_form(plan.shared, plan, query) == expected


@given(steps_with_first_blocks())
def test_block_0_adds_no_group(step: tuple[HeadShape, StepRows, int]) -> None:
    shape, rows, least_saved = step
    plan = DecodePlan(shape, rows, least_saved)
    plain = [[0, *ids] if base == BLOCK else ids for ids, base in zip(rows.block_ids, rows.bases, strict=True)]
    bases = [0 if base == BLOCK else base for base in rows.bases]
    without = DecodePlan(shape, replace(rows, block_ids=plain, bases=bases, first_ids=()), 1 << 30)
    assert len(plan.own.spans) == len(without.own.spans)
    if plan.shared is None:
        assert plan.own.longest == without.own.longest


def test_rows_that_share_block_0_and_later_ones_read_them_together() -> None:
    rows = StepRows([[1, 2], [1, 3], [4]], [256] * 3, [600, 700, 300], 1, open_ids=[[5], [6], [7]], first_ids=[8, 8, 9])
    plan = DecodePlan(HeadShape(64, 1, 4, 64, mx.float16, by_channel=True), rows, least_saved=1)
    assert plan.shared is not None
    [shared] = plan.shared.spans
    assert (shared.block_ids, shared.begin, shared.end, shared.first_is_open) == ((8, 1), 0, 512, True)
    assert [(span.begin, span.first_is_open) for span in plan.own.spans] == [(512, False), (512, False), (0, True)]


def test_residuals_of_block_0_are_in_tables_beside() -> None:
    residual_ids = [(15, 16, 17), (19,), (20, 21, 22)]
    rows = StepRows([[6], [], [9, 8]], [256] * 3, [600, 20, 800], 1, 460, residual_ids, [[1], [2], [3]], [4, -1, -1])
    plan = DecodePlan(HeadShape(64, 1, 4, 64, mx.float16, by_channel=True, value_rank=8), rows)
    assert [(span.block_ids, span.base, span.begin) for span in plan.own.spans] == [
        ((4, 6), 0, 141),
        ((2,), 0, 0),
        ((9, 8), 256, 341),
    ]
    assert plan.beside is not None
    assert [span.block_ids for span in plan.beside.spans] == residual_ids


@given(st.one_of(steps_with_open_blocks(), steps_with_first_blocks()))
def test_tables_of_a_launch_are_equally_wide_and_cut(step: tuple[HeadShape, StepRows, int]) -> None:
    shape, rows, least_saved = step
    plan = DecodePlan(shape, rows, least_saved)
    assert plan.own.table.shape == (len(plan.own.spans), plan.own.width)
    for span in plan.own.spans:
        assert len({plan.positions.tolist()[query] // BLOCK for query in span.members}) == 1
        assert 0 < len(span.members) <= plan.own.size
    if plan.beside is not None:
        assert plan.beside.width == plan.own.width
        assert np.array_equal(plan.beside.bounds, plan.own.bounds)
    if plan.shared is not None:
        assert {span.open_slot for span in plan.shared.spans} == {-1}


def test_threadgroup_memory_suffices_for_every_shape() -> None:
    for dim in (32, 64, 96, 128, 192, 256):
        for gqa in range(1, 17):
            for dtype in (mx.float32, mx.float16):
                shape = HeadShape(dim, 1, gqa, 32, dtype)
                for tiling in (*(own_tiling(shape, n) for n in range(1, 9)), shared_tiling(shape)):
                    assert tiling.pool_size(shape) * 16 + 2 * 4 * tiling.simdgroups * tiling.tiles * 8 <= 32768
                    rows = tiling.tiles * 8 * (tiling.simdgroups if tiling.cooperative else 1)
                    assert tiling.members * gqa <= rows


def test_a_prefix_that_saves_little_is_read_by_each_row() -> None:
    rows = StepRows([[1, 2], [1, 3]], [0, 0], [300, 300], 1)
    shape = HeadShape(64, 1, 4, 64, mx.float16)
    assert DecodePlan(shape, rows).shared is None
    assert DecodePlan(shape, rows, least_saved=256).shared is not None
