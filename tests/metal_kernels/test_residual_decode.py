"""Decoding with values' residuals against its definition, in the emulator: numbers, findings, bytes, planted bugs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, error
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.tiling import HeadShape, own_tiling
from tests.marks import slow
from tests.metal_kernels.cases import ids, lengths_of
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Schedule
from tests.metal_kernels.test_planted_bugs import BARRIERS, MERGE, NUMBERS, SYNTAX, Bug, caught, decoded_right, firsts

pytestmark = needs_clang

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32

SHAPES = [
    Case(64, 2, 1, F32, (40, 256), value_rank=1),
    Case(64, 2, 16, BF16, (40, 257), value_rank=8),
    Case(128, 2, 4, F16, (40, 255), value_rank=16),
    Case(128, 1, 7, F32, (257,), value_rank=64),
    Case(96, 1, 3, F16, (257,), value_rank=12),
    Case(64, 1, 8, F16, (257,), value_rank=64),
    Case(128, 1, 16, F32, (257,), value_rank=1),
    Case(128, 1, 2, BF16, (257,), value_rank=64),
    Case(192, 1, 4, F32, (257,), value_rank=16),
    Case(256, 1, 16, F16, (40,), value_rank=64),
    Case(256, 1, 5, F32, (40,), value_rank=64),
]
FEATURES = [
    Case(64, lengths=(300, 700), window=256, num_tokens=3, sinks=True, value_rank=8),
    Case(64, dtype=BF16, lengths=(270,), window=64, softcap=5.0, sinks=True, num_tokens=5, value_rank=16),
    Case(64, dtype=F16, lengths=(20, 280), num_tokens=8, value_rank=3),
]
CASES = [*SHAPES, *FEATURES]
ALWAYS = [*SHAPES[:3], FEATURES[0]]


@pytest.mark.parametrize("case", [case if case in ALWAYS else slow(case) for case in CASES], ids=ids(CASES))
def test_every_shape_rank_and_feature(case: Case, emulate: Emulate) -> None:
    log = emulate()
    arenas = Arenas.of(case)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[case.dtype]
    if case in SHAPES:
        tokens = sum(length + 1 for length in case.lengths)
        read = log[0].traffic["residuals"].read
        assert read == tokens * case.kv_heads * case.value_rank * 2, "of true rank, once a row and kv head"


# A step is cut as without residuals; of its rows each has tables of its own.
CUTS = [(length, rows) for length in (1, 255, 256, 257, 4095) for rows in (1, 3, 16)]
KEPT = ((255, 1), (257, 3))


@pytest.mark.parametrize(("length", "rows"), [cut if cut in KEPT else slow(*cut) for cut in CUTS], ids=str)
def test_every_length_and_number_of_rows(length: int, rows: int, emulate: Emulate) -> None:
    emulate(Schedule(check=length * rows <= 4096))
    case = Case(64, gqa=2, lengths=lengths_of(length, rows), seed=length + rows, value_rank=8)
    arenas = Arenas.of(case)
    assert error(arenas.decoded(threadgroups=3), arenas.expected()) <= TOLERANCE[F32]


@pytest.mark.parametrize("schedule", [*map(slow, SCHEDULES[:-1]), SCHEDULES[-1]], ids=str)
def test_no_finding_in_any_schedule(schedule: Schedule, emulate: Emulate) -> None:
    emulate(schedule)
    arenas = Arenas.of(Case(64, 1, 4, F16, (130, 300), num_tokens=2, sinks=True, value_rank=12))
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[F16]


def test_what_is_told_apart_is_computed_apart(emulate: Emulate) -> None:
    """Rows that begin with the same blocks of base have residuals of their own, so each reads all of its tokens."""
    emulate()
    arenas = Arenas.of(Case(64, 1, 2, F32, (300, 290), prefix=1, value_rank=8))
    assert arenas.plan().shared is None
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[F32]
    assert arenas.residuals is not None
    without = Arenas(**{**arenas.__dict__, "residuals": None}).expected()
    assert np.abs(arenas.expected() - without).max() > 0.05


def test_tables_of_residuals_are_cut_as_those_of_base() -> None:
    shape = HeadShape(64, 1, 4, 64, F32, value_rank=8)
    rows = StepRows([[5, 6, 7], [9]], [256, 0], [900, 20], 1, 300, [[15, 16, 17], [19]])
    plan = DecodePlan(shape, rows)
    assert plan.beside is not None
    assert [(span.base, span.begin, span.end, span.members) for span in plan.own.spans] == [
        (span.base, span.begin, span.end, span.members) for span in plan.beside.spans
    ]
    assert [span.block_ids for span in plan.own.spans] == [(6, 7), (9,)]
    assert [span.block_ids for span in plan.beside.spans] == [(16, 17), (19,)]


def test_threadgroup_memory_suffices_for_every_rank() -> None:
    for dim in (64, 96, 128, 192, 256):
        for gqa, rank, dtype in ((1, 64, F32), (16, 64, F32), (16, 64, F16), (5, 1, F32), (4, 16, F16)):
            shape = HeadShape(dim, 1, gqa, 32, dtype, value_rank=rank)
            tiling = own_tiling(shape, 1)
            assert tiling.pool_size(shape) * 16 + 2 * 4 * tiling.simdgroups * tiling.tiles * 8 <= 32768


# -- planted bugs -------------------------------------------------------------------------------------------------

ROWS = Case(64, 2, 3, F32, (300, 40), num_tokens=2, window=280, sinks=True, value_rank=12)
EIGHTS = Case(64, 1, 2, F16, (300,), value_rank=16)
AFTER_VALUES = "            UNROLL for (int tile = 0; tile < TILES; ++tile) {"
BUGS = [
    Bug("barrier missing", f"{BARRIERS}{AFTER_VALUES}", AFTER_VALUES, "race"),
    Bug("table off by a block", "(residual_table + group * width, next", "(residual_table + 1, next", NUMBERS),
    Bug(
        "stride of whole eights",
        "(rows.row + token) * RANK + column",
        "(rows.row + token) * (EIGHTS * 8) + column",
        "out-of-bounds",
    ),
    Bug(
        "tail unguarded",
        "token < rows.last && column < RANK) {",
        "token < 16 && column < RANK) {",
        NUMBERS,
    ),
    Bug(
        "tokens not staged",
        "if (token < 16) stage8(",
        "if (token < 12) stage8(",
        "uninitialised",
    ),
    Bug("over the values", "+ sg * 16 * LD + D, LD, lane, low", "+ sg * 16 * LD + D - 8, LD, lane, low", "race"),
    Bug(
        "sum not rescaled",
        "UNROLL for (int n = 0; n < DV / 8; ++n) {\n"
        "                    UNROLL for (int e = 0; e < 2; ++e) put(out[n], i, e, element(out[n], i, e) * keep);\n"
        "                }\n            }\n            if (COOPERATIVE)",
        "UNROLL for (int n = 0; n < D / 8; ++n) {\n"
        "                    UNROLL for (int e = 0; e < 2; ++e) put(out[n], i, e, element(out[n], i, e) * keep);\n"
        "                }\n            }\n            if (COOPERATIVE)",
        NUMBERS,
    ),
    Bug("sums left out", "i < MEMBERS * GQA * DV; i +=", "i < MEMBERS * GQA * DV - 8; i +=", "unwritten"),
    Bug("memory without residuals", "float4 pool[POOL];", "float4 pool[POOL / 2];", "out-of-bounds"),
    Bug("pointer without address space", "void load8(const device half* from", "void load8(const half* from", SYNTAX),
    Bug("B of another head", "(head / GQA * RANK + r)", "(head % HEADS * RANK + r)", NUMBERS, MERGE),
    Bug("B the other way round", "* RANK + r) * D + d]", "* RANK) * D + d * RANK + r]", NUMBERS, MERGE),
    Bug("divided twice", "low[d - D] = sum;", "low[d - D] = sum / total;", NUMBERS, MERGE),
    Bug(
        "sums not waited for",
        "low[d - D] = sum;\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "low[d - D] = sum;",
        "race",
        MERGE,
    ),
    Bug(
        "barrier that some pass by",
        "low[d - D] = sum;\n        threadgroup_barrier",
        "low[d - D] = sum;\n        if (d < D) threadgroup_barrier",
        "barrier",
        MERGE,
    ),
    Bug("threads without a sum", "if (d < DV && s < own_splits)", "if (s < own_splits)", "out-of-bounds", MERGE),
    Bug("threads without a value", "if (part == 0 && d < D) out[", "if (part == 0) out[", "race", MERGE),
    Bug("sums beside their array", "float low[RANK > 0 ? RANK : 1];", "float low[1];", "out-of-bounds", MERGE),
]
OF_EIGHTS = [
    Bug("halves exchanged", "x[4 * i + e] = four[e];", "x[4 * (1 - i) + e] = four[e];", NUMBERS),
    Bug("eights exchanged", "* RANK + column;", "* RANK + (RANK - 8 - column);", NUMBERS),
]


@pytest.mark.parametrize("bug", firsts(BUGS), ids=str)
def test_a_planted_bug_is_caught(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decoded_right(ROWS))


@pytest.mark.parametrize("bug", firsts(OF_EIGHTS), ids=str)
def test_a_planted_bug_is_caught_where_eights_are_loaded_at_once(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decoded_right(EIGHTS))


def test_there_are_enough_of_enough_classes() -> None:
    assert len(BUGS) >= 10
    assert len({bug.caught_by for bug in BUGS}) >= 6


@pytest.mark.slow
def test_nothing_is_caught_where_nothing_is_planted(emulate: Emulate) -> None:
    emulate()
    assert caught(lambda: decoded_right(ROWS)) == caught(lambda: decoded_right(EIGHTS)) == ()
