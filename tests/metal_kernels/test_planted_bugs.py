"""Bugs planted in the kernels' text: each must be caught, and by the detector that is for its class.

A detector is a kind of the emulator's findings, or `NUMBERS` (off by more than the tolerance, or no numbers: unread
places hold NaN), or `SYNTAX` (Metal's or CUDA's compiler would refuse it).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.kv.packed import quantise
from agentcache.kv.packing import Quantisation
from agentcache.metal_kernels.append import Places, append
from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, error
from tests.marks import slow
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.build import KernelSyntaxError
from tests.metal_kernels.emulator.capture import Launch
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import KernelFindings
from tests.metal_kernels.test_append import drawn
from tests.metal_kernels.test_unpack import run as run_unpack

pytestmark = needs_clang

NUMBERS, SYNTAX = "numbers", "syntax"
DECODE, MERGE, UNPACK = "agentcache_decode", "agentcache_merge", "agentcache_unpack"
APPEND = "agentcache_append"
ROW = Case(128, 2, 3, mx.float32, (300, 40), num_tokens=2, window=280, sinks=True)
PREFIX = Case(64, 1, 3, mx.float16, (600, 530, 90, 517), prefix=2)
OWN_BARRIER = "else simdgroup_barrier(mem_flags::mem_threadgroup);"
SHARED_BARRIER = "if (COOPERATIVE) threadgroup_barrier(mem_flags::mem_threadgroup);"
BARRIERS = f"        {SHARED_BARRIER}\n        {OWN_BARRIER}\n"
AFTER_KEYS = "        Sums<Q> scores[TILES * 2];"
AFTER_VALUES = "        UNROLL for (int tile = 0; tile < TILES; ++tile) {"
AFTER_LOOP = "    }\n\n    const int mine"


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` in a kernel's text, and `caught_by` must say so."""

    kind: str
    old: str
    new: str
    caught_by: str
    kernel: str = DECODE

    def __str__(self) -> str:
        return self.kind.replace(" ", "-")

    def plant(self, launch: Launch) -> Launch:
        return launch.edited(self.old, self.new)


def firsts(bugs: Sequence[Bug]) -> list[Any]:
    """As parameters: all, of which `make test` plants the first that each detector is to catch."""
    first = {bug.caught_by: bug for bug in reversed(bugs)}
    return [bug if bug is first[bug.caught_by] else slow(bug) for bug in bugs]


ROW_BUGS = [
    Bug("barrier missing", f"{BARRIERS}{AFTER_KEYS}", AFTER_KEYS, "race"),
    Bug("race with right numbers", f"{BARRIERS}{AFTER_LOOP}", AFTER_LOOP, "race"),
    Bug(
        "barrier of another memory",
        "    if (!COOPERATIVE) {\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
        "    if (!COOPERATIVE) {\n        threadgroup_barrier(mem_flags::mem_device);",
        "race",
    ),
    Bug(
        "barrier that some pass by",
        "            threadgroup_barrier(",
        "            if (sg == 0) threadgroup_barrier(",
        "barrier",
    ),
    Bug("scale of another group", "tile.scale[u] = scales[at];", "tile.scale[u] = scales[at / 2 * 2];", NUMBERS),
    Bug("scale and bias exchanged", "tile.bias[u] = biases[at];", "tile.bias[u] = scales[at];", NUMBERS),
    Bug(
        "nibbles from the high end",
        "fma(float((word >> (16 * i + 4 * e)) & 15u), float(scale)",
        "fma(float((word >> (28 - 16 * i - 4 * e)) & 15u), float(scale)",
        NUMBERS,
    ),
    Bug("sum not rescaled", "z[i] *= keep;", "", NUMBERS),
    Bug("simdgroups not rescaled", "* metal::exp2(peaks[g * Q * 8 + row] - top)", "", NUMBERS),
    Bug(
        "table off by a block",
        "slots[place / 256]) * HEADS",
        "slots[(place + 1) / 256]) * HEADS",
        NUMBERS,
    ),
    Bug("window off by one", "t > last[i] - window", "t >= last[i] - window", NUMBERS),
    Bug("causal off by one", "t <= last[i]", "t < last[i]", NUMBERS),
    Bug("heads mapped otherwise", "+ head * GQA + row % GQA;", "+ row % GQA * HEADS + head;", NUMBERS),
    Bug(
        "tail unguarded",
        "token < rows.last) {\n            const size_t at",
        "token < 16) {\n            const size_t at",
        NUMBERS,
    ),
    Bug("tokens before the window", "rows.first = metal::max(0, from - place);", "rows.first = 0;", NUMBERS),
    Bug(
        "partial never written",
        "} else if (tile_column(lane) == 0) {",
        "} else if (tile_column(lane) == 0 && sg == 0) {",
        "uninitialised",
    ),
    Bug(
        "partial beside its array",
        "peaks[sg * Q * 8 + row] = m[i];",
        "peaks[sg * Q * 16 + row] = m[i];",
        "out-of-bounds",
    ),
    Bug("register array too short", "last[i] = who", "last[i + Q] = who", "undefined"),
    Bug(
        "simd operation under divergence",
        "top = metal::max(top, simd_shuffle_xor(top, ROW_PEER_1));",
        "if (tile_row(lane) > 0) top = metal::max(top, simd_shuffle_xor(top, ROW_PEER_1));",
        "divergent",
    ),
    Bug(
        "output left out",
        "for (int i = tid; i < MEMBERS * GQA * DV; i += NSG * 32) {",
        "for (int i = tid + 32; i < MEMBERS * GQA * DV; i += NSG * 32) {",
        "unwritten",
    ),
    Bug("threadgroup memory", "threadgroup float4 pool[POOL];", "threadgroup float4 pool[2 * POOL];", "limit"),
    Bug(
        "parts not waited for",
        "parts[part * WIDTH + d] = sum;\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "parts[part * WIDTH + d] = sum;",
        "uninitialised",
        MERGE,
    ),
    Bug("pointer without address space", "const device uint4* from", "const uint4* from", SYNTAX),
    Bug("split weighed by nothing", "total += weights[i] * totals[i]", "total += totals[i]", NUMBERS, MERGE),
    Bug(
        "sink of another head",
        "SINKS ? sinks[head]",
        "SINKS ? sinks[head / GQA]",
        NUMBERS,
        MERGE,
    ),
]
PREFIX_BUGS = [
    Bug("barrier missing", f"{BARRIERS}{AFTER_KEYS}", AFTER_KEYS, "race"),
    Bug(
        "barrier too weak",
        f"{BARRIERS}{AFTER_VALUES}",
        BARRIERS.replace("threadgroup_b", "simdgroup_b", 1) + AFTER_VALUES,
        "race",
    ),
    Bug("race with right numbers", f"{BARRIERS}{AFTER_LOOP}", AFTER_LOOP, "race"),
    Bug(
        "nibbles from the high end",
        "(word >> (16 * i + 4 * e)) & 15u) | 0x6400u)) - half(1024), scale",
        "(word >> (28 - 16 * i - 4 * e)) & 15u) | 0x6400u)) - half(1024), scale",
        NUMBERS,
    ),
    Bug("scale of another token", "tile.scale[u] = scales[at];", "tile.scale[u] = scales[at / 2];", NUMBERS),
    Bug("sum not rescaled", "z[i] *= keep;", "", NUMBERS),
    Bug("queries of another simdgroup", "COOPERATIVE ? sg * Q * 8 : 0", "COOPERATIVE ? sg * Q * 4 : 0", "race"),
    Bug("tokens of another simdgroup", "tiles + tile * 16 * LD + n * 8", "tiles + n * 8", NUMBERS),
    Bug("table off by a block", "slots[place / 256]) * HEADS", "slots[0]) * HEADS", NUMBERS),
    Bug(
        "rows beyond the group", "if (own_rows + row < MEMBERS * GQA) {", "if (row < MEMBERS * GQA) {", "out-of-bounds"
    ),
    Bug("heads mapped otherwise", "row_tokens + who % row_tokens) * D", "row_tokens + row % GQA) * D", "out-of-bounds"),
    Bug("splits overlap", "+ split * ROUND;", "+ split * (ROUND - 64);", NUMBERS),
    Bug(
        "partial never written",
        "if (tile_column(lane) == 0) {\n                    tops",
        "if (tile_column(lane) == 0 && sg == 0) {\n                    tops",
        "unwritten",
    ),
    Bug(
        "uninitialised queries",
        "stage[row * LD + column] =",
        "if (row < 40) stage[row * LD + column] =",
        "uninitialised",
    ),
    Bug("row in no group", "(shared >= 0 ? params[2] : 0)", "params[2]", "out-of-bounds", MERGE),
    Bug("shared part left out", "(d < DV && s < splits)", "(d < DV && s < own_splits)", NUMBERS, MERGE),
    Bug("split twice", "own_sums[(own_at + s) * DV + d]", "own_sums[own_at * DV + d]", NUMBERS, MERGE),
    Bug("implicit rounding", "static_cast<T>(sum / total)", "sum / total", SYNTAX, MERGE),
]
UNPACK_BUGS = [
    Bug("tail unguarded", "if (real) store8<T>", "store8<T>", "out-of-bounds", UNPACK),
    Bug("tail too short", "i < HEADS * tokens * WORDS", "i < HEADS * tokens * WORDS - 1", "unwritten", UNPACK),
    Bug("scale of the simdgroup", "if (lane % SHARE == 0) {", "if (lane == 0) {", NUMBERS, UNPACK),
    Bug("scale of another group", "+ i % WORDS / SHARE", "+ 0", NUMBERS, UNPACK),
    Bug(
        "bias of another lane",
        "bias = simd_shuffle(bias, ushort(lane / SHARE * SHARE))",
        "bias = simd_shuffle(bias, ushort(0))",
        NUMBERS,
        UNPACK,
    ),
    Bug(
        "simd operation under divergence",
        "    scale = simd_shuffle",
        "    if (real) scale = simd_shuffle",
        "divergent",
        UNPACK,
    ),
    Bug(
        "nibbles from the high end",
        "(word >> (4 * e)) & 15u), scale",
        "(word >> (28 - 4 * e)) & 15u), scale",
        NUMBERS,
        UNPACK,
    ),
    Bug("table off by a block", "table[token / 256]", "table[(token + 1) / 256]", NUMBERS, UNPACK),
    Bug("heads mapped otherwise", "i / WORDS / tokens;", "i / WORDS % HEADS;", NUMBERS, UNPACK),
    Bug("place beyond the block", "* 256 + token % 256", "* 256 + token", NUMBERS, UNPACK),
    Bug("two threads, one place", "out + size_t(i) * 8", "out + size_t(i / 2) * 8", "race", UNPACK),
    Bug("beside the end", "out + size_t(i) * 8", "out + size_t(i) * 8 + 8", "out-of-bounds", UNPACK),
    Bug("write to an input", "scale = float(scales[at]);", "scales[at] = half(0);", SYNTAX, UNPACK),
    Bug("double", "float scale = 0.0f;", "double scale = 0.0;", SYNTAX, UNPACK),
]


APPEND_BUGS = [
    Bug(
        "tail unguarded",
        "    if (real) {\n        const int token",
        "    {\n        const int token",
        "out-of-bounds",
        APPEND,
    ),
    Bug("tail read", "real ? float(is_key", "true ? float(is_key", "out-of-bounds", APPEND),
    Bug("last word left out", "i < SIDES * side_words;", "i < SIDES * side_words - 1;", NUMBERS, APPEND),
    Bug("values left out", "i < SIDES * side_words;", "i < side_words;", NUMBERS, APPEND),
    Bug("values to the keys", "(is_key ? kq : vq)", "(is_key ? kq : kq)", "race", APPEND),
    Bug("range of half a group", "int b = SHARE / 2;", "int b = SHARE / 4;", NUMBERS, APPEND),
    Bug("range of two groups", "int b = SHARE / 2;", "int b = SHARE;", NUMBERS, APPEND),
    Bug(
        "simd operation under divergence",
        "        low = metal::min(low, simd_shuffle_xor",
        "        if (real) low = metal::min(low, simd_shuffle_xor",
        "divergent",
        APPEND,
    ),
    Bug(
        "scale of another group",
        "% WORDS / SHARE;\n            scales",
        "% WORDS / SHARE / 2;\n            scales",
        "race",
        APPEND,
    ),
    Bug("every lane its scale", "if (lane % SHARE == 0)", "if (true)", "race", APPEND),
    Bug("nibbles from the high end", "<< (4 * e)", "<< (28 - 4 * e)", NUMBERS, APPEND),
    Bug("fifteen becomes sixteen", "bias) / scale), 15.0f)", "bias) / scale), 16.0f)", NUMBERS, APPEND),
    Bug("rounded down", "metal::rint((x[e] - bias) / scale)", "metal::floor((x[e] - bias) / scale)", NUMBERS, APPEND),
    Bug("always from above", "from_below ? low : high", "high", NUMBERS, APPEND),
    Bug("two threads, one place", "data[row * WORDS", "data[row / 256 * WORDS", "race", APPEND),
    Bug("heads mapped otherwise", "/ 256) * HEADS + head)", "/ 256) + head)", NUMBERS, APPEND),
    Bug("place off by a block", "size_t(place / 256)", "size_t((place + 1) / 256)", NUMBERS, APPEND),
    Bug("token of another row", "/ HEADS * row_tokens + token]", "/ HEADS + token]", "race", APPEND),
    Bug("nothing to wait for", "if (i == 0) written[0] = 0;", "", "unwritten", APPEND),
    Bug("write to an input", "data[row * WORDS", "params[0] = 0; data[row * WORDS", SYNTAX, APPEND),
    Bug("double", "const float range =", "const double range =", SYNTAX, APPEND),
]


def caught(compute: Callable[[], bool]) -> Sequence[str]:
    """The detectors that speak up; `compute` says whether the numbers are right."""
    try:
        return () if compute() else (NUMBERS,)
    except KernelFindings as found:
        return tuple(dict.fromkeys(found.kinds))
    except KernelSyntaxError:
        return (SYNTAX,)


def decoded_right(case: Case) -> bool:
    arenas = Arenas.of(case)
    return error(arenas.decoded(threadgroups=6), arenas.expected()) <= TOLERANCE[case.dtype]


def unpacked_right() -> bool:
    out, expected = run_unpack(Case(96, 2, dtype=mx.float32, lengths=(261,)))
    return error(out, expected) <= 1e-6


@pytest.mark.parametrize("bug", firsts(ROW_BUGS), ids=str)
def test_decode(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decoded_right(ROW))


def appended_right() -> bool:
    """A step of two rows, five tokens each, of which some go to another block."""
    keys, values = drawn((2, 3, 5, 96), mx.float32), drawn((2, 3, 5, 96), mx.float32, seed=1)
    places = [254, 255, 3 * 256, 3 * 256 + 1, 3 * 256 + 2, *range(512 + 9, 512 + 14)]
    widths = ((12, mx.uint32), (3, mx.float16), (3, mx.float16))
    arenas = [mx.zeros((4, 3, 256, width), dtype) for _ in range(2) for width, dtype in widths]
    mx.eval(arenas)
    made = Places(mx.array(places, mx.int32), mx.array([10, 5], mx.int32))
    mx.eval(append([keys, values], arenas, made, 32))
    wanted = [np.zeros_like(np.array(arena)) for arena in arenas]
    for index, part in enumerate([*quantise(keys, Quantisation(4, 32)), *quantise(values, Quantisation(4, 32))]):
        tokens = np.array(part).swapaxes(1, 2).reshape(10, 3, -1)
        for place, token in zip(places, tokens, strict=True):
            wanted[index][place // 256, :, place % 256] = token
    return all(np.array_equal(np.array(one), other) for one, other in zip(arenas, wanted, strict=True))


@pytest.mark.parametrize("bug", firsts(APPEND_BUGS), ids=str)
def test_append(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(appended_right)


@pytest.mark.parametrize("bug", firsts(PREFIX_BUGS), ids=str)
def test_shared_prefix_decode(bug: Bug, emulate: Emulate) -> None:
    """Rows' own parts come first, and in ROW_BUGS: what is planted in the shared part only is caught there."""
    launches = itertools.count()
    emulate(edits={bug.kernel: lambda it: bug.plant(it) if bug.kernel == MERGE or next(launches) else it})
    assert bug.caught_by in caught(lambda: decoded_right(PREFIX))


@pytest.mark.parametrize("bug", firsts(UNPACK_BUGS), ids=str)
def test_unpack(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(unpacked_right)


@pytest.mark.parametrize(
    "bugs", [ROW_BUGS, PREFIX_BUGS, UNPACK_BUGS, APPEND_BUGS], ids=["decode", "prefix", "unpack", "append"]
)
def test_there_are_enough_of_enough_classes(bugs: Sequence[Bug]) -> None:
    assert len(bugs) >= 10
    assert len({bug.kind for bug in bugs}) >= 10
    assert len({bug.caught_by for bug in bugs}) >= 5


@pytest.mark.slow
def test_nothing_is_caught_where_nothing_is_planted(emulate: Emulate) -> None:
    emulate()
    assert caught(lambda: decoded_right(ROW)) == caught(lambda: decoded_right(PREFIX)) == ()
    assert caught(unpacked_right) == caught(appended_right) == ()
