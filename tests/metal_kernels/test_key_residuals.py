"""Decoding with keys' residuals against its definition, in the emulator: numbers, findings, bytes, planted bugs."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, error
from agentcache.metal_kernels.rope_tables import laid_out, packed_b
from agentcache.metal_kernels.tiling import HeadShape, own_tiling
from tests.marks import slow
from tests.metal_kernels.cases import ids, lengths_of
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Schedule
from tests.metal_kernels.test_decode import PACKED, bytes_per_token
from tests.metal_kernels.test_planted_bugs import BARRIERS, NUMBERS, SYNTAX, Bug, caught, decoded_right, firsts

pytestmark = needs_clang

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32

SHAPES = [
    Case(64, 2, 2, F32, (40, 256), value_rank=3, key_rank=5, pairs=32),
    Case(128, 2, 4, BF16, (40, 130), value_rank=16, key_rank=16, pairs=64),
    Case(64, 2, 16, F16, (40, 255), key_rank=64, pairs=32, normed=True),
    Case(96, 1, 3, F32, (257,), value_rank=8, key_rank=12, pairs=16, interleaved=True, normed=True),
    Case(64, 2, 3, BF16, (257,), key_rank=1, pairs=0, normed=True),
    Case(128, 1, 7, F32, (257,), value_rank=64, key_rank=64, pairs=64),
    Case(192, 1, 4, F16, (257,), value_rank=16, key_rank=17, pairs=96),
    Case(256, 1, 16, F16, (40,), value_rank=64, key_rank=64, pairs=128, normed=True),
    Case(256, 1, 5, F32, (40,), value_rank=64, key_rank=64, pairs=64, interleaved=True),
    Case(128, 2, 8, BF16, (257,), value_rank=8, key_rank=32, pairs=48),
]
FEATURES = [
    Case(64, 2, 3, F16, (300, 700), 3, 250, None, True, value_rank=8, key_rank=8, pairs=32, normed=True),
    Case(64, dtype=F32, lengths=(270,), window=70, softcap=5.0, num_tokens=5, key_rank=16, pairs=24),
    Case(64, dtype=F16, lengths=(20, 280), num_tokens=16, key_rank=3, pairs=32, interleaved=True),
]
CASES = [*SHAPES, *FEATURES]
ALWAYS = [*SHAPES[:3], FEATURES[0]]


@pytest.mark.parametrize("case", [case if case in ALWAYS else slow(case) for case in CASES], ids=ids(CASES))
def test_every_shape_rank_and_feature(case: Case, emulate: Emulate) -> None:
    log = emulate()
    arenas = Arenas.of(case)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[case.dtype]
    if case in SHAPES:
        read, tokens = log[0].traffic, sum(length + 1 for length in case.lengths)
        assert sum(read[name].read for name in PACKED) == tokens * bytes_per_token(case)
        assert read["key_residuals"].read == tokens * case.kv_heads * case.key_rank * 2, "of true rank, once a head"
        assert read["residuals"].read == tokens * case.kv_heads * case.value_rank * 2
        assert read["key_norms"].read == tokens * case.kv_heads * 4 * case.normed


# A step is cut as without residuals; where its tiles begin decides by what keys are turned.
CUTS = [(length, rows) for length in (1, 255, 256, 257, 4095) for rows in (1, 3, 16)]
KEPT = ((255, 1), (257, 3))


@pytest.mark.parametrize(("length", "rows"), [cut if cut in KEPT else slow(*cut) for cut in CUTS], ids=str)
def test_every_length_and_number_of_rows(length: int, rows: int, emulate: Emulate) -> None:
    emulate(Schedule(check=length * rows <= 1024))
    case = Case(64, gqa=2, lengths=lengths_of(length, rows), seed=length + rows, value_rank=8, key_rank=8, pairs=32)
    arenas = Arenas.of(case)
    assert error(arenas.decoded(threadgroups=3), arenas.expected()) <= TOLERANCE[F32]


@pytest.mark.parametrize("schedule", [*map(slow, SCHEDULES[:-1]), SCHEDULES[-1]], ids=str)
def test_no_finding_in_any_schedule(schedule: Schedule, emulate: Emulate) -> None:
    emulate(schedule)
    case = Case(64, 1, 3, F16, (130, 300), 2, 200, None, True, value_rank=12, key_rank=12, pairs=24, normed=True)
    arenas = Arenas.of(case)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[F16]


def test_what_matters_is_seen() -> None:
    """Without the residuals, the norms, rope, or with neighbours for pairs, numbers are others."""
    arenas = Arenas.of(Case(64, 1, 2, F32, (300,), key_rank=8, pairs=32, normed=True))
    keys = arenas.key_residuals
    assert keys is not None
    for other in (None, *(replace(keys, **one) for one in ({"norms": None}, {"interleaved": True}))):
        assert np.abs(replace(arenas, key_residuals=other).expected() - arenas.expected()).max() > 0.02
    still = replace(keys, angles=np.zeros(32))
    assert np.abs(replace(arenas, key_residuals=still).expected() - arenas.expected()).max() > 0.02


def test_turns_of_two_pairs_are_neighbours() -> None:
    cosines, sines = mx.array([[1.0, 2.0, 3.0, 4.0]]), mx.array([[5.0, 6.0, 7.0, 8.0]])
    assert laid_out(cosines, sines, F32).tolist() == [[1, 2, 5, 6, 3, 4, 7, 8]]


def test_b_is_filled_up_and_put_in_order() -> None:
    b = mx.arange(2 * 3 * 32).reshape(2, 3, 32).astype(F32)
    turns = Arenas.of(Case(32, key_rank=3, pairs=8, interleaved=True)).given_residuals().keys.turns  # type: ignore[union-attr]
    packed = np.array(packed_b(b, turns, F32))
    assert packed.shape == (2, 32, 16)
    order = [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32)]
    assert (packed[..., :3] == np.array(b).swapaxes(1, 2)[:, order]).all()
    assert not packed[..., 3:].any()


def test_threadgroup_memory_suffices_for_every_rank() -> None:
    for dim in (64, 96, 128, 192, 256):
        for gqa, rank, dtype in ((1, 64, F32), (16, 64, F32), (16, 64, F16), (5, 1, F32), (4, 16, F16)):
            shape = HeadShape(dim, 1, gqa, 32, dtype, value_rank=1, key_rank=rank, pairs=dim // 2)
            tiling = own_tiling(shape, 1)
            assert tiling.pool_size(shape) * 16 + 2 * 4 * tiling.simdgroups * tiling.tiles * 8 <= 32768


# -- planted bugs -------------------------------------------------------------------------------------------------

ROWS = Case(64, 2, 3, F32, (300, 40), 2, 277, None, True, value_rank=5, key_rank=12, pairs=32, normed=True)
INTERLEAVED = Case(64, 1, 2, F16, (300,), key_rank=16, pairs=16, interleaved=True)
BEFORE_VALUES = "            if (is_open) {\n                stage_open<HEADS, D, GS>(stage + sg * 16 * LD, LD, ovq"
BUGS = [
    Bug("barrier missing", f"{BARRIERS}{BEFORE_VALUES}", BEFORE_VALUES, "race"),
    Bug(
        "over the keys",
        "(stage + sg * 16 * LD + D, LD, lane, key_low)",
        "(stage + sg * 16 * LD + D - 8, LD, lane, key_low)",
        "race",
    ),
    Bug(
        "rank not staged", "load_low(low[r], stage + r * 16,", "load_low(low[r], stage + r * 16 + 16,", "uninitialised"
    ),
    Bug(
        "B of another head",
        "size_t(head) * (D * KEY_RANKS * 16)",
        "size_t(head) * (D * KEY_RANKS * 32)",
        "out-of-bounds",
    ),
    Bug("turns beyond their table", "metal::min(here, end - 1)", "here + 16", "out-of-bounds"),
    Bug("register array too short", "load_low(low[r],", "load_low(low[r + 1],", "undefined"),
    Bug(
        "simd operation under divergence",
        "const float own = simd_shuffle(factor, ushort(",
        "float own = factor; if (lane < 16) own = simd_shuffle(factor, ushort(",
        "divergent",
    ),
    Bug("pointer without address space", "const device S* near, const", "const S* near, const", SYNTAX),
    Bug(
        "table of base",
        "find_beside(residual_table + group * width, next",
        "find_beside(table + group * width, next",
        NUMBERS,
    ),
    Bug(
        "norms of another head",
        "x[1] = norms[at + 1];",
        "x[1] = norms[(rows.row + lane) * HEADS * 2 + 1];",
        NUMBERS,
    ),
    Bug("norms exchanged", "x[0] = norms[at];", "x[0] = norms[at + 1];", NUMBERS),
    Bug("norm of another token", "ushort(n * 8 + tile_column(lane) + e));", "ushort(tile_column(lane) + e));", NUMBERS),
    Bug(
        "queries turned onward",
        "static_cast<S>(first * cosine + second * sine);",
        "static_cast<S>(first * cosine - second * sine);",
        NUMBERS,
    ),
    Bug("sine of another pair", "const float sine = float(at[2 + e]);", "const float sine = float(at[2]);", NUMBERS),
    Bug("place in the tile", "turns + (i * 8 + tile_column(lane) + e)", "turns + (tile_column(lane) + e)", NUMBERS),
    Bug("turns of another tile", "size_t(begins / 16)", "size_t(begins / 32)", NUMBERS),
    Bug("neighbours for pairs", "turns ? k + PAIRS / 8 : 2 * k + 1;", "2 * k + 1;", NUMBERS),
    Bug("keys of the first eight tokens", "x.tile[i], sums.tile[r]);", "x.tile[0], sums.tile[r]);", NUMBERS),
]
OF_INTERLEAVED = [
    Bug("queries as they were", "i % D / 2 + i % 2 * PAIRS;", "i % D;", NUMBERS),
    Bug("queries of the other order", "queries + (WAYS - 1) * (D / 16)", "queries", NUMBERS),
    Bug(
        "queries not waited for",
        "stage + own_rows * LD + k * 16, LD);\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "stage + own_rows * LD + k * 16, LD);",
        "race",
    ),
    Bug(
        "barrier that some pass by",
        "stage + own_rows * LD + k * 16, LD);\n        threadgroup_barrier",
        "stage + own_rows * LD + k * 16, LD);\n        if (sg == 0) threadgroup_barrier",
        "barrier",
    ),
]


@pytest.mark.parametrize("bug", firsts(BUGS), ids=str)
def test_a_planted_bug_is_caught(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decoded_right(ROWS))


@pytest.mark.parametrize("bug", firsts(OF_INTERLEAVED), ids=str)
def test_a_planted_bug_is_caught_where_pairs_are_neighbours(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decoded_right(INTERLEAVED))


def test_there_are_enough_of_enough_classes() -> None:
    assert len({bug.kind for bug in (*BUGS, *OF_INTERLEAVED)}) >= 10
    assert len({bug.caught_by for bug in (*BUGS, *OF_INTERLEAVED)}) >= 6


@pytest.mark.slow
def test_nothing_is_caught_where_nothing_is_planted(emulate: Emulate) -> None:
    emulate()
    assert caught(lambda: decoded_right(ROWS)) == caught(lambda: decoded_right(INTERLEAVED)) == ()
