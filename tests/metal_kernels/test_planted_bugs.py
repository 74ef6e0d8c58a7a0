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
from agentcache.metal_kernels.block_cases import BlockCase
from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, error
from tests.marks import slow
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.build import KernelSyntaxError
from tests.metal_kernels.emulator.capture import Launch
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import KernelFindings
from tests.metal_kernels.test_append import drawn
from tests.metal_kernels.test_unpack import run as run_unpack
from tests.metal_kernels.test_unpack import run_by_channel, run_mixed

pytestmark = needs_clang

NUMBERS, SYNTAX = "numbers", "syntax"
DECODE, MERGE, UNPACK = "agentcache_decode", "agentcache_merge", "agentcache_unpack"
APPEND = "agentcache_append"
ROW = Case(128, 2, 3, mx.float32, (300, 40), num_tokens=2, window=280, sinks=True)
PREFIX = Case(64, 1, 3, mx.float16, (600, 530, 90, 517), prefix=2)
OWN_BARRIER = "else simdgroup_barrier(mem_flags::mem_threadgroup);"
SHARED_BARRIER = "if (COOPERATIVE) threadgroup_barrier(mem_flags::mem_threadgroup);"
BARRIERS = f"            {SHARED_BARRIER}\n            {OWN_BARRIER}\n"
AFTER_KEYS = "            Sums<Q> scores[TILES * 2];"
AFTER_VALUES = "            UNROLL for (int tile = 0; tile < TILES; ++tile) {"
AFTER_LOOP = "        }\n    }\n\n    const int mine"


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
    """As parameters: all, of which `make test` plants the first that changes numbers and the first that does not.

    That each detector speaks up is shown by small kernels in test_emulator.py.
    """
    first = {bug.caught_by == NUMBERS: bug for bug in reversed(bugs)}
    return [bug if bug in first.values() else slow(bug) for bug in bugs]


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
        "slots[(place + 16) / 256]) * HEADS",
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
    Bug("tail unguarded", "if (t * RUNS < count) {", "{", "out-of-bounds", UNPACK),
    Bug("tail too short", "tokens - first : 0;", "tokens - first - 1 : 0;", "unwritten", UNPACK),
    Bug("scale of the simdgroup", "count && lane % SHARE == 0;", "count && lane == 0;", NUMBERS, UNPACK),
    Bug("scale of another group", "row * (D / GS) + unit / (GS / 8);", "row * (D / GS);", NUMBERS, UNPACK),
    Bug(
        "bias of another lane",
        "simd_shuffle(own_bias, ushort(lane / SHARE * SHARE))",
        "simd_shuffle(own_bias, ushort(0))",
        NUMBERS,
        UNPACK,
    ),
    Bug(
        "simd operation under divergence",
        "            scale[t] = simd_shuffle",
        "            if (count > 0) scale[t] = simd_shuffle",
        "divergent",
        UNPACK,
    ),
    Bug("nibbles from the high end", "] >> (e * BITS % 32)", "] >> (28 - e * BITS % 32)", NUMBERS, UNPACK),
    Bug("table off by a block", "table[group / 4]", "table[(group + 1) / 4]", NUMBERS, UNPACK),
    Bug("heads mapped otherwise", "i / UNITS / RUNS / groups;", "i / UNITS % HEADS;", "unwritten", UNPACK),
    Bug("place beyond the block", "* 256 + first % 256;", "* 256 + first;", NUMBERS, UNPACK),
    Bug("two threads, one place", "* D + unit * 8;", "* D + unit / 2 * 8;", "race", UNPACK),
    Bug("beside the end", "* D + unit * 8;", "* D + unit * 8 + 8;", "out-of-bounds", UNPACK),
    Bug("write to an input", "uint words[TOKENS", "scales[0] = half(0); uint words[TOKENS", SYNTAX, UNPACK),
    Bug("double", "const float own_scale", "const double own_scale", SYNTAX, UNPACK),
]
BY_CHANNEL_BUGS = [
    Bug("groups of 32 tokens", "row / 64 * D + unit", "row / 32 * D + unit", NUMBERS, UNPACK),
    Bug("group off by one", "row / 64 * D + unit", "(row / 64 + 1) * D + unit", NUMBERS, UNPACK),
    Bug("scale of another channel", "* D + unit * 8 :", "* D :", NUMBERS, UNPACK),
    Bug("one scale for eight channels", "const int of = BY_CHANNEL ? e : t;", "const int of = 0;", NUMBERS, UNPACK),
    Bug(
        "bias as scale", "load_factors<BY_CHANNEL>(biases + at", "load_factors<BY_CHANNEL>(scales + at", NUMBERS, UNPACK
    ),
    Bug("scales per token", "return BY_CHANNEL ?", "return !BY_CHANNEL ?", NUMBERS, UNPACK),
    Bug("tokens in a row", "to + t * RUNS * D", "to + t * D", "race", UNPACK),
    Bug("words of the next token", "data + ((row + t * RUNS)", "data + ((row + t)", NUMBERS, UNPACK),
    Bug("tail unguarded", "if (t * RUNS < count) {", "if (count > 0) {", "race", UNPACK),
    Bug("tail not read", "if (t * RUNS < count)\n ", "if (t == 0 && count > 0)\n ", NUMBERS, UNPACK),
    Bug("last group left out", "(tokens + 63) / 64;", "tokens / 64;", "unwritten", UNPACK),
    Bug("registers too short", "uint words[TOKENS * BITS / 4];", "uint words[TOKENS * BITS / 8];", "undefined", UNPACK),
    Bug("write to an input", "uint words[TOKENS", "scales[0] = half(0); uint words[TOKENS", SYNTAX, UNPACK),
]
MIXED_BUGS = [
    Bug("open blocks as full ones", "HAS_OPEN && slot < 0;", "false;", "out-of-bounds", UNPACK),
    Bug("full blocks as open ones", "HAS_OPEN && slot < 0;", "HAS_OPEN;", "out-of-bounds", UNPACK),
    Bug("slot of the next open block", "is_open ? -1 - slot", "is_open ? -slot", NUMBERS, UNPACK),
    Bug("groups of full blocks", "false, D, OPEN_GS, 8,", "false, D, GS, 8,", NUMBERS, UNPACK),
    Bug("open blocks in 4 bits", "OPEN_GS, 8, TOKENS", "OPEN_GS, 4, TOKENS", NUMBERS, UNPACK),
    Bug(
        "scale of the first token",
        "const int of = BY_CHANNEL ? e : t;",
        "const int of = BY_CHANNEL ? e : 0;",
        NUMBERS,
        UNPACK,
    ),
]


APPEND_BUGS = [
    Bug(
        "tail unguarded", "    if (real) {\n        const int token", "    {\n        const int token", "out-of-bounds"
    ),
    Bug("tail read", "real ? limited(float(is_key", "true ? limited(float(is_key", "out-of-bounds"),
    Bug("last unit left out", "i < SIDES * side_units;", "i < SIDES * side_units - 1;", NUMBERS),
    Bug("values left out", "i < SIDES * side_units;", "i < side_units;", NUMBERS),
    Bug("values to the keys", "(is_key ? kq : vq)", "(is_key ? kq : kq)", "race"),
    Bug("range of half a group", "int b = SHARE / 2;", "int b = SHARE / 4;", NUMBERS),
    Bug("range of two groups", "int b = SHARE / 2;", "int b = SHARE;", NUMBERS),
    Bug(
        "simd operation under divergence",
        "        low = metal::min(low, simd_shuffle_xor",
        "        if (x[0] > 0.0f) low = metal::min(low, simd_shuffle_xor",
        "divergent",
    ),
    Bug("scale of another group", "(row * units + unit) / (GS / 8);", "(row * units + unit) / (GS / 4);", "race"),
    Bug("every lane its scale", "if (unit % (GS / 8) == 0) {", "{", "race"),
    Bug("nibbles from the high end", "code << (bits * e);", "code << (32 - bits - bits * e);", NUMBERS),
    Bug("highest code one more", "bias) / scale), most)));", "bias) / scale), most + 1.0f)));", NUMBERS),
    Bug("rounded down", "metal::rint((x[e] - bias) / scale)", "metal::floor((x[e] - bias) / scale)", NUMBERS),
    Bug("always from above", "from_below ? low : high", "high", NUMBERS),
    Bug("two threads, one place", "data[(row * units + unit) * (bits / 4)]", "data[row / 256 * units + unit]", "race"),
    Bug("heads mapped otherwise", "/ 256) * HEADS + head)", "/ 256) + head)", NUMBERS),
    Bug("place off by a block", "size_t(place / 256)", "size_t((place + 1) / 256)", NUMBERS),
    Bug("token of another row", "/ HEADS * row_tokens + token]", "/ HEADS + token]", "race"),
    Bug("nothing to wait for", "if (i == 0) written[0] = 0;", "", "unwritten"),
    Bug("write to an input", "float x[8];\n", "params[0] = 0; float x[8];\n", SYNTAX),
    Bug("double", "const float range =", "const double range =", SYNTAX),
]
EIGHT_BITS_BUGS = [
    Bug("fifteen steps", "float((1 << bits) - 1);", "15.0f;", NUMBERS),
    Bug("second word left out", "if (bits == 8) data", "if (bits == 16) data", NUMBERS),
    Bug("values as keys", "is_key ? KEY_BITS : VALUE_BITS", "KEY_BITS", "out-of-bounds"),
    Bug("words exchanged", "words[1] |= code << (bits * e - 32);", "words[0] |= code << (bits * e - 32);", NUMBERS),
    Bug("words of 4 bits", "* units + unit) * (bits / 4)]", "* units + unit)]", "race"),
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


def mixed_right() -> bool:
    out, expected = run_mixed(BlockCase(96, 2), 700)
    return error(out, expected) <= 1e-6


def by_channel_right() -> bool:
    out, expected = run_by_channel(BlockCase(96, 2), 261)
    return error(out, expected) <= 1e-6


def appended_right(key_bits: int = 4, value_bits: int = 4) -> bool:
    """A step of two rows, five tokens each, of which some go to another block."""
    keys, values = drawn((2, 3, 5, 96), mx.float32), drawn((2, 3, 5, 96), mx.float32, seed=1)
    places = [254, 255, 3 * 256, 3 * 256 + 1, 3 * 256 + 2, *range(512 + 9, 512 + 14)]
    both = (Quantisation(key_bits, 32), Quantisation(value_bits, 32))
    widths = [((3 * each.bits, mx.uint32), (3, mx.float16), (3, mx.float16)) for each in both]
    arenas = [mx.zeros((4, 3, 256, width), dtype) for side in widths for width, dtype in side]
    mx.eval(arenas)
    made = Places(mx.array(places, mx.int32), mx.array([10, 5], mx.int32))
    mx.eval(append([keys, values], arenas, made, 32))
    wanted = [np.zeros_like(np.array(arena)) for arena in arenas]
    for index, part in enumerate([*quantise(keys, both[0]), *quantise(values, both[1])]):
        tokens = np.array(part).swapaxes(1, 2).reshape(10, 3, -1)
        for place, token in zip(places, tokens, strict=True):
            wanted[index][place // 256, :, place % 256] = token
    return all(np.array_equal(np.array(one), other) for one, other in zip(arenas, wanted, strict=True))


@pytest.mark.parametrize("bug", firsts(APPEND_BUGS), ids=str)
def test_append(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={APPEND: bug.plant})
    assert bug.caught_by in caught(appended_right)


@pytest.mark.parametrize("bug", EIGHT_BITS_BUGS, ids=str)
def test_append_of_keys_in_eight_bits(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={APPEND: bug.plant})
    assert bug.caught_by in caught(lambda: appended_right(8, 4))


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


@pytest.mark.parametrize("bug", firsts(BY_CHANNEL_BUGS), ids=str)
def test_unpack_by_channel(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(by_channel_right)


@pytest.mark.parametrize("bug", firsts(MIXED_BUGS), ids=str)
def test_unpack_of_full_and_open_blocks(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(mixed_right)


@pytest.mark.parametrize(
    "bugs",
    [ROW_BUGS, PREFIX_BUGS, UNPACK_BUGS, BY_CHANNEL_BUGS, APPEND_BUGS],
    ids=["decode", "prefix", "unpack", "unpack by channel", "append"],
)
def test_there_are_enough_of_enough_classes(bugs: Sequence[Bug]) -> None:
    assert len(bugs) >= 10
    assert len({bug.kind for bug in bugs}) >= 10
    assert len({bug.caught_by for bug in bugs}) >= 5


@pytest.mark.slow
def test_nothing_is_caught_where_nothing_is_planted(emulate: Emulate) -> None:
    emulate()
    assert caught(lambda: decoded_right(ROW)) == caught(lambda: decoded_right(PREFIX)) == ()
    assert caught(unpacked_right) == caught(by_channel_right) == caught(mixed_right) == caught(appended_right) == ()
    assert caught(lambda: appended_right(8, 4)) == caught(lambda: appended_right(8, 8)) == ()
