"""Unpacking with residuals against its definition, in the emulator: numbers, findings, bytes, planted bugs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.block_cases import unpacked_with_residuals
from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, error
from tests.marks import slow
from tests.metal_kernels.cases import UNPACK_RESIDUAL_CASES
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Schedule
from tests.metal_kernels.test_planted_bugs import NUMBERS, SYNTAX, Bug, caught, firsts
from tests.pairwise import and_slow_pairs, covering

pytestmark = needs_clang

F16, F32 = mx.float16, mx.float32
KERNEL = "agentcache_unpack_residual"


def off(case: Case, side: str) -> float:
    """Largest difference, as a part of the largest value where that is above 1: what is written is rounded."""
    out, expected = Arenas.of(case).unpacked(side)
    assert out.dtype == case.dtype
    return error(out, expected) / max(1.0, float(np.nanmax(np.abs(expected))))


SIDES = ("keys", "values")


def covered(cases: Sequence[Case], *others: Sequence[Any]) -> list[Any]:
    """The first case with all others always; half of all cases, of any two sizes, types and turns, slow."""
    sizes = len(cases) // 6
    chosen = [cases[6 * size + 2 * dtype + turns] for size, dtype, turns in covering(range(sizes), range(3), range(2))]
    return and_slow_pairs([*product(cases[:1], *others)], chosen, *others)


@pytest.mark.parametrize(("case", "side"), covered(UNPACK_RESIDUAL_CASES, SIDES), ids=str)
def test_every_shape_and_rank(case: Case, side: str, emulate: Emulate) -> None:
    emulate()
    assert off(case, side) <= TOLERANCE[case.dtype]


def off_in(case: Case, side: str, opened: bool) -> float:
    """As `off`, of open or full blocks."""
    out, expected = unpacked_with_residuals(case, side, opened)
    return error(out, expected) / max(1.0, float(np.nanmax(np.abs(expected))))


@pytest.mark.parametrize(("case", "side", "opened"), covered(UNPACK_RESIDUAL_CASES, SIDES, (False, True)), ids=str)
def test_every_shape_of_full_and_open_blocks(case: Case, side: str, opened: bool, emulate: Emulate) -> None:
    emulate()
    assert off_in(case, side, opened) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("length", [1, 8, 63, 64, slow(254), slow(700)])
def test_every_length_of_keys_by_channel(length: int, emulate: Emulate) -> None:
    emulate()
    assert off_in(Case(64, 2, lengths=(length,), key_rank=8, pairs=32), "keys", False) <= TOLERANCE[F32]


@pytest.mark.parametrize("length", [1, 255, slow(256), slow(257), slow(4095)])
def test_every_length(length: int, emulate: Emulate) -> None:
    emulate(Schedule(check=length < 1000))
    assert off(Case(64, lengths=(length,), key_rank=8, pairs=32), "keys") <= TOLERANCE[F32]


def test_a_window_begins_at_its_block(emulate: Emulate) -> None:
    """What is in front of a window in its first block is NaN, and nobody attends to it."""
    emulate()
    out, expected = Arenas.of(Case(64, lengths=(700,), window=250, key_rank=8, pairs=32)).unpacked("keys")
    first = 700 - 250 + 1 - 256
    assert error(out[:, :, first:], expected[:, :, first:]) <= TOLERANCE[F32]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_finding_in_any_schedule(schedule: Schedule, emulate: Emulate) -> None:
    emulate(schedule)
    assert off(Case(96, 3, dtype=F16, lengths=(37,), key_rank=5, pairs=16, normed=True), "keys") <= TOLERANCE[F16]


def test_packed_words_are_read_once(emulate: Emulate) -> None:
    log = emulate()
    off(Case(128, 2, dtype=F16, lengths=(259,), key_rank=16, pairs=64), "keys")
    [result] = log
    assert result.traffic["data"].read == 260 * 2 * 128 // 2
    assert result.traffic["out"].written == 260 * 2 * 128 * 2


APART = Case(64, 2, dtype=F32, lengths=(261,), group=32, key_rank=5, pairs=16, normed=True)
NEIGHBOURS = Case(64, 2, dtype=F32, lengths=(261,), key_rank=8, pairs=16, interleaved=True)
BUGS = [
    Bug("tail unguarded", "if (token < tokens) {", "{", "out-of-bounds"),
    Bug("tail too short", "(tokens + TOKENS - 1) / TOKENS", "tokens / TOKENS", "unwritten"),
    Bug("residual of another token", "* 256 + token % 256;\n            UNROLL", "* 256;\n            UNROLL", NUMBERS),
    Bug("table of base", "size_t(residual_table[token / 256])", "size_t(table[token / 256])", NUMBERS),
    Bug("sums not begun", "x[t * 8 + e] = 0.0f;\n", "\n", NUMBERS),
    Bug("register array too short", "y[t * 8 + e] = 0.0f;", "y[t * 8 + e + 8] = 0.0f;", "undefined"),
    Bug("B of another head", "size_t(head * RANK + begin + r)", "size_t(begin + r)", NUMBERS),
    Bug("norms of another head", "norms[(at[t] * HEADS + head) * 2 + 1]", "norms[at[t] * HEADS * 2 + 1]", NUMBERS),
    Bug("turned back", "a = x * cosine - b * sine;", "a = x * cosine + b * sine;", NUMBERS),
    Bug("turns of another tile", "size_t((base + token) / STEP)", "size_t((base + token) / STEP + 1)", NUMBERS),
    Bug("scale of another group", "row * (D / GS) + unit / (GS / 8);", "row * (D / GS);", NUMBERS),
    Bug("two threads, one place", "store8<T>(out + to + b * 8, w);", "store8<T>(out + to + a * 8, w);", "unwritten"),
    Bug("threads over each other", "(size_t(head) * tokens + token) * D;", "size_t(token) * D;", "race"),
    Bug("write to an input", "float agent = 1.0f;", "norms[0] = half(0); float agent = 1.0f;", SYNTAX),
]


BY_CHANNEL_BUGS = [
    Bug("groups of 32 tokens", "row / 64 * D + unit", "row / 32 * D + unit", NUMBERS),
    Bug("group of the first token", "begin_row, a, b, factors);", "begin_row / 256 * 256, a, b, factors);", NUMBERS),
    Bug("scale of the other unit", "BY_CHANNEL>(scales + at[i]", "BY_CHANNEL>(scales + at[0]", NUMBERS),
    Bug("one scale for eight channels", "float(own[BY_CHANNEL ? e : 0])", "float(own[0])", NUMBERS),
    Bug("per token", "if (BY_CHANNEL) load_both", "if (!BY_CHANNEL) load_both", NUMBERS),
]


@pytest.mark.parametrize("bug", BY_CHANNEL_BUGS, ids=str)
def test_a_planted_bug_is_caught_by_channel(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={KERNEL: bug.plant})
    assert bug.caught_by in caught(lambda: off_in(APART, "keys", False) <= TOLERANCE[F32])


@pytest.mark.parametrize("bug", firsts(BUGS), ids=str)
def test_a_planted_bug_is_caught(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={KERNEL: bug.plant})
    assert bug.caught_by in caught(lambda: off(APART, "keys") <= TOLERANCE[F32])


def test_a_planted_bug_is_caught_where_pairs_are_neighbours(emulate: Emulate) -> None:
    bug = Bug("pairs of another word", "b * 4 + e / 2, near, far", "a * 4 + e / 2, near, far", NUMBERS)
    emulate(edits={KERNEL: bug.plant})
    assert bug.caught_by in caught(lambda: off(NEIGHBOURS, "keys") <= TOLERANCE[F32])


def test_there_are_enough_of_enough_classes(emulate: Emulate) -> None:
    assert len({bug.caught_by for bug in BUGS}) >= 6
    emulate()
    for case in (APART, NEIGHBOURS):
        assert caught(lambda case=case: off(case, "keys") <= TOLERANCE[F32]) == ()
        assert caught(lambda case=case: off_in(case, "keys", False) <= TOLERANCE[F32]) == ()
