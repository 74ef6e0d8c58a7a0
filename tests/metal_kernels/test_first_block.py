"""Decoding with block 0 in its open form, and later blocks by channel, against its definition, in the emulator."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, as_computed, error
from agentcache.metal_kernels.definition import unpacked, unpacked_by_channel
from tests.marks import slow
from tests.metal_kernels import test_by_channel
from tests.metal_kernels.cases import ids, lengths_of
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Result, Schedule
from tests.metal_kernels.test_by_channel import read, side_bytes
from tests.metal_kernels.test_planted_bugs import NUMBERS, Bug, caught
from tests.metal_kernels.test_planted_bugs import decoded_right as decodes_right

F16, F32 = mx.float16, mx.float32


def with_first(*cases: Case) -> list[Case]:
    return [replace(case, by_channel=True, first_is_open=True) for case in cases]


[ROWS, WINDOWED, CROSSING, SHARED, ONLY_FIRST, RESIDUAL] = with_first(
    Case(64, 1, 2, F32, (40, 256, 530)),
    Case(64, 1, 2, F32, (700, 300, 250), window=460, num_tokens=8),
    Case(64, gqa=1, lengths=(240,), num_tokens=32),
    Case(64, 1, 4, F16, (600, 520, 512, 300), prefix=2),
    Case(64, 1, 4, F16, (300, 400, 280, 255), prefix=1),
    Case(64, 1, 2, F32, (254, 300), 4, value_rank=3, key_rank=5, pairs=32),
)
ALWAYS = [ROWS, WINDOWED, CROSSING, SHARED, RESIDUAL]
OTHERS = with_first(
    *test_by_channel.SHAPES,
    *(case for case in test_by_channel.FEATURES if case.num_tokens < 32),
    *test_by_channel.PREFIXES,
    *test_by_channel.RESIDUALS,
    Case(64, lengths=(700, 600, 300), window=500, sinks=True, num_tokens=3),
    Case(64, lengths=(600, 250, 511), num_tokens=32, dtype=F16),
    Case(64, 2, 3, F16, (700, 300, 20), 3, 490, None, True, value_rank=8, key_rank=8, pairs=32, normed=True),
)
CASES = [*ALWAYS, ONLY_FIRST, *OTHERS]


@needs_clang
@pytest.mark.parametrize("case", [*ALWAYS, *map(slow, CASES[len(ALWAYS) :])], ids=ids(CASES))
def test_every_shape_and_feature(case: Case, emulate: Emulate) -> None:
    log = emulate()
    arenas = Arenas.of(case)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[case.dtype]
    if case == ROWS:
        assert len(log) == 2, "one launch, and the one that merges"
        assert moved(log[0], case) == (256, 41 + (256 + 1) + (256 + 19))
    elif case == SHARED:
        own, shared, _ = log
        assert moved(shared, case) == (256, 256), "once for all rows"
        assert moved(own, case) == (0, 89 + 9 + 1 + 256 + 45), "the last row has a block 0 of its own"


def moved(launch: Result, case: Case) -> tuple[int, ...]:
    """Tokens that a launch reads for each kv head: in the full form, and in the open one."""
    full, opened = read(launch, "vq", "vs", "vb"), read(launch, "ovq", "ovs", "ovb")
    assert read(launch, "okq", "oks", "okb") == opened
    return tuple(size // (case.kv_heads * side_bytes(case, bits)) for size, bits in ((full, 4), (opened, 8)))


CUTS = [(length, rows) for length in (256, 257, 272, 321, 512, 513, 577, 4102) for rows in (1, 3)]


@needs_clang
@pytest.mark.slow
@pytest.mark.parametrize(("length", "rows"), CUTS, ids=str)
def test_every_length_and_number_of_rows(length: int, rows: int, emulate: Emulate) -> None:
    emulate(Schedule(check=length * rows <= 1024))
    [case] = with_first(Case(64, gqa=2, lengths=lengths_of(length, rows), seed=length + rows))
    arenas = Arenas.of(case)
    for threadgroups in (1, 3, 64):
        assert error(arenas.decoded(threadgroups), arenas.expected()) <= TOLERANCE[F32]


@needs_clang
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("case", [WINDOWED, SHARED, RESIDUAL], ids=ids([WINDOWED, SHARED, RESIDUAL]))
def test_no_finding_in_any_schedule(case: Case, schedule: Schedule, emulate: Emulate) -> None:
    emulate(schedule)
    arenas = Arenas.of(case)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[case.dtype]


@needs_clang
def test_a_window_reads_no_more_of_block_0_than_itself(emulate: Emulate) -> None:
    log = emulate()
    [case] = with_first(Case(64, 1, 2, F32, (700, 300), window=460))
    Arenas.of(case).decoded()
    assert moved(log[0], case) == (256, 15 + 189 + 256 + 45)


@needs_clang
def test_a_query_may_read_its_own_block_when_it_is_full(emulate: Emulate) -> None:
    """As rows with residuals do, whose base has sealed the block."""
    emulate()
    longer = Arenas.of(ROWS)
    assert longer.open_blocks is not None
    opened = replace(longer.open_blocks, block_ids=[[-1]], first_ids=longer.open_blocks.first_ids[2:])
    case = replace(ROWS, lengths=(510,))
    arenas = replace(longer, case=case, block_ids=longer.block_ids[2:], bases=[256], queries=longer.queries[2:])
    arenas = replace(arenas, open_blocks=opened)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[F32]


@pytest.mark.parametrize("window", [None, 270])
def test_the_definition_is_the_rule(window: int | None) -> None:
    """By positions alone: a query reads block 0 and its own block in 8 bits, others by channel."""
    [case] = with_first(Case(32, 1, 1, F32, (505,), num_tokens=12, window=window))
    arenas = Arenas.of(case)
    opened = arenas.open_blocks
    assert opened is not None
    [full], [own_ids], [first] = arenas.block_ids, opened.block_ids, opened.first_ids
    sealed = [unpacked_by_channel(arenas.keys), unpacked(arenas.values)]
    in_bytes = [unpacked(opened.keys, 8), unpacked(opened.values, 8)]
    queries = as_computed(arenas.queries, F32)
    for token in range(12):
        q = 505 + token
        of_side: list[list[np.ndarray]] = [[], []]
        for t in range(0 if window is None else q - window + 1, q + 1):
            block, place = divmod(t, 256)
            form, slot = (sealed, full[block - 1]) if 0 < block < q // 256 else (in_bytes, -1)
            if form is in_bytes:
                slot = own_ids[block - 1] if block == q // 256 else first
            for side, values in zip(of_side, form, strict=True):
                side.append(values[slot, 0, place])
        keys, values = map(np.array, of_side)
        weights = np.exp(keys @ queries[0, 0, token] * case.scale)
        assert np.allclose(arenas.expected()[0, 0, token], weights / weights.sum() @ values)


# -- planted bugs -------------------------------------------------------------------------------------------------

[PLANTED, PLANTED_SHARED, PLANTED_RESIDUAL] = with_first(
    Case(64, 1, 2, F32, (700, 300, 40), window=490),
    Case(64, 1, 4, F16, (600, 530, 90), prefix=2),
    Case(64, 2, 2, F32, (300, 40), value_rank=3, key_rank=5, pairs=32),
)
BEFORE_VALUES = (
    "end - slot_at, lane);\n            } else {\n                stage_tile(stage + sg * 16 * LD, LD, values"
)
SLOT = "is_first ? table[group * width] : own_slot;"
BUGS = [
    Bug("own slot for block 0", SLOT, "own_slot;", NUMBERS),
    Bug("block 0 of another row", SLOT, "is_first ? table[0] : own_slot;", NUMBERS),
    Bug("block 0 left out", "back + sealed / ROUND * ROUND : opens;", "tail : opens;", NUMBERS),
    Bug("window ignored", f"begin - slot_at, {BEFORE_VALUES}", f"0, {BEFORE_VALUES}", NUMBERS),
    Bug("a row without block 0 reads it", "= spans[5 * group + 4];", "= 256;", NUMBERS),
    Bug("block 0 read from full blocks, too", "= spans[5 * group + 4];", "= begin;", NUMBERS),
    Bug("full blocks from another token", "sealed / ROUND * ROUND + split", "begin / ROUND * ROUND + split", NUMBERS),
    Bug("at positions behind the last", "is_first ? turn - back : turn;", "turn;", NUMBERS),
    Bug("place of another block", "is_first ? base : opens;", "opens;", NUMBERS),
    Bug("rounds not whole", "(end + ROUND - 1) / ROUND * ROUND;", "end;", NUMBERS),
    Bug("rounds not begun at the window's", "tail - begin / ROUND * ROUND;", "tail - begin;", NUMBERS),
]
SHARED_BUGS = [
    Bug("own slot for block 0", SLOT, "own_slot;", "out-of-bounds"),
    *(bug for bug in BUGS if bug.kind in ("block 0 left out", "at positions behind the last")),
]
RESIDUAL_BUGS = [
    Bug("residuals not of block 0", "place - back, from, metal::min", "place, from, metal::min", NUMBERS),
    Bug("residuals of no block", "from, metal::min(sealed, stop))", "from, from)", NUMBERS),
]


@needs_clang
@pytest.mark.parametrize("bug", [BUGS[0], *map(slow, BUGS[1:])], ids=str)
def test_a_planted_bug_is_caught(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decodes_right(PLANTED))


@needs_clang
@pytest.mark.slow
@pytest.mark.parametrize("bug", SHARED_BUGS, ids=str)
def test_a_planted_bug_in_a_shared_prefix_is_caught(bug: Bug, emulate: Emulate) -> None:
    """Rows of this case read block 0 only there."""
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decodes_right(PLANTED_SHARED))


@needs_clang
@pytest.mark.slow
@pytest.mark.parametrize("bug", RESIDUAL_BUGS, ids=str)
def test_a_planted_bug_of_residuals_is_caught(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decodes_right(PLANTED_RESIDUAL))


@needs_clang
@pytest.mark.slow
def test_nothing_is_caught_where_nothing_is_planted(emulate: Emulate) -> None:
    emulate()
    for case in (PLANTED, PLANTED_SHARED, PLANTED_RESIDUAL):
        assert caught(lambda: decodes_right(case)) == ()  # noqa: B023
