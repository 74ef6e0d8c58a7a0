"""Sealing and reopening blocks against MLX's operations and the definition, in the emulator; planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from agentcache.kv.by_channel import pack_by_channel, unpack_by_channel
from agentcache.kv.packed import Packed, dequantise, quantise
from agentcache.kv.packing import Quantisation
from agentcache.metal_kernels.append import Places, append
from agentcache.metal_kernels.block_cases import BlockCase, Blocks
from agentcache.metal_kernels.definition import PackedNumpy, reopened, sealed, unpacked
from agentcache.metal_kernels.seal import reopen, seal
from tests.marks import slow
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Schedule
from tests.metal_kernels.test_planted_bugs import NUMBERS, SYNTAX, Bug, caught, firsts

pytestmark = needs_clang

SEAL, REOPEN = "agentcache_seal", "agentcache_reopen"
CASES = [
    BlockCase(96),
    BlockCase(64, 3, group=32),
    *map(slow, (BlockCase(32, 1), BlockCase(64), BlockCase(128), BlockCase(192, 1), BlockCase(256, 1))),
]
ODD = BlockCase(96, 3, 3)  # whose last threadgroup is not full
Arrays = Sequence[mx.array]
Change = Callable[[Blocks], tuple[Arrays, Arrays]]


def sealing(blocks: Blocks) -> tuple[Arrays, Arrays]:
    """Arrays of full blocks after `seal`, and what MLX's operations leave there."""
    opened, full = blocks.arrays()
    expected = list(map(mx.array, full))
    per_token = Quantisation(4, blocks.case.group_size)
    keys, values = (_opened(opened[3 * side : 3 * side + 3], blocks) for side in range(2))
    for into, part in zip(expected, [*pack_by_channel(keys), *quantise(values, per_token)], strict=True):
        into[mx.array(blocks.full_ids)] = part
    mx.eval(expected)
    mx.eval(seal(opened, full, ids(blocks.open_ids), ids(blocks.full_ids)))
    return full, expected


def reopening(blocks: Blocks) -> tuple[Arrays, Arrays]:
    """Arrays of open blocks after `reopen`, and what MLX's operations leave there."""
    opened, full = blocks.arrays()
    expected = list(map(mx.array, opened))
    group_size = blocks.case.group_size
    keys = unpack_by_channel(_at(full[:3], blocks.full_ids), mx.float32)
    values = dequantise(_at(full[3:], blocks.full_ids), Quantisation(4, group_size), mx.float32)
    parts = [part for side in (keys, values) for part in quantise(side, Quantisation(8, group_size))]
    for into, part in zip(expected, parts, strict=True):
        into[mx.array(blocks.open_ids)] = part
    mx.eval(expected)
    mx.eval(reopen(opened, full, ids(blocks.full_ids), ids(blocks.open_ids)))
    return opened, expected


def ids(slots: Sequence[int]) -> mx.array:
    return mx.array(slots, mx.int32)


def _at(arrays: Arrays, slots: Sequence[int]) -> Packed:
    data, scales, biases = (array[mx.array(slots)] for array in arrays)
    return Packed(data, scales, biases)


def _opened(arrays: Arrays, blocks: Blocks) -> mx.array:
    return dequantise(_at(arrays, blocks.open_ids), Quantisation(8, blocks.case.group_size), mx.float32)


def equal(made: Arrays, expected: Arrays) -> bool:
    """Bit for bit, also in slots that hold NaN."""
    pairs = zip(made, expected, strict=True)
    return all(np.array_equal(np.array(one).view(np.uint16), np.array(other).view(np.uint16)) for one, other in pairs)


@pytest.mark.parametrize("change", [sealing, reopening])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_equal_what_mlx_packs_and_others_stay(case: BlockCase, change: Change, emulate: Emulate) -> None:
    emulate()
    assert equal(*change(Blocks.of(case)))


@pytest.mark.parametrize("change", [sealing, reopening])
@pytest.mark.parametrize("num_blocks", [1, 5])
def test_any_number_of_blocks(num_blocks: int, change: Change, emulate: Emulate) -> None:
    emulate()
    assert equal(*change(Blocks.of(BlockCase(32, 1, num_blocks))))


@pytest.mark.parametrize("change", [sealing, reopening])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_finding_in_any_schedule(schedule: Schedule, change: Change, emulate: Emulate) -> None:
    emulate(schedule)
    assert equal(*change(Blocks.of(BlockCase(32, 3, 1))))


def extreme(blocks: Blocks) -> Blocks:
    """Open blocks with channels far from 0, at the limits, and of no numbers."""
    first, second, _ = blocks.open_ids
    for side in blocks.sides:
        data, scales, biases = side.opened
        codes = data[first, 0].view(np.uint8)  # 2000 + 49 is no float16: biases become 2048
        codes[:, ::2], codes[:, 1::2] = 49, 49 + np.arange(256)[:, None] % 16
        scales[first, 0], biases[first, 0] = 1, 2000
        scales[first, 1], biases[first, 1] = 1e-7, 0
        biases[second, 0, 5] = np.nan
        scales[second, 0, 70], biases[second, 0, 70] = 250, -32000
        scales[second, 1, ::2], biases[second, 1, ::2] = 0, -29984
        scales[second, 1, 1::2], biases[second, 1, 1::2] = 0, 30000
    return blocks


def test_what_is_far_from_zero_or_no_number_is_sealed_as_by_operations(emulate: Emulate) -> None:
    emulate()
    full, expected = sealing(extreme(Blocks.of(ODD)))
    assert equal(full, expected)


def test_both_equal_the_definition(emulate: Emulate) -> None:
    emulate()
    blocks = Blocks.of(BlockCase(96))
    group_size, slots = blocks.case.group_size, blocks.open_ids
    made = sealing(blocks)[0]
    wanted = sealed(_of(blocks.keys.opened, slots), _of(blocks.values.opened, slots), group_size)
    for part, other in zip(made, [*wanted[0], *wanted[1]], strict=True):
        np.testing.assert_array_equal(np.array(part)[blocks.full_ids], other)
    slots = blocks.full_ids
    wanted = reopened(_of(blocks.keys.full, slots), _of(blocks.values.full, slots), group_size)
    after = blocks.with_open(list(reopening(blocks)[0]))
    for side, other in zip(after.sides, wanted, strict=True):  # values right between two steps go either way
        assert np.abs(side.open_values(blocks.open_ids) - unpacked(other, 8)).max() <= np.abs(other[1]).max()


def _of(packed: PackedNumpy, slots: list[int]) -> PackedNumpy:
    return packed[0][slots], packed[1][slots], packed[2][slots]


def test_a_sealed_block_is_right_to_half_a_step(emulate: Emulate) -> None:
    emulate()
    blocks = Blocks.of(BlockCase(64))
    after = blocks.with_full(list(sealing(blocks)[0]))
    for side, steps in zip(after.sides, (0.51, 1.01), strict=True):  # `mx.quantize` may miss the far end by a step
        difference = np.abs(side.full_values(after.full_ids) - side.open_values(after.open_ids))
        assert difference.max() <= steps * np.abs(side.full[1][after.full_ids]).max()


def test_a_block_is_sealed_behind_the_append_of_its_last_token(emulate: Emulate) -> None:
    emulate()
    blocks = Blocks.of(BlockCase(64, 2, 1))
    opened, full = blocks.arrays()
    expected = [list(map(mx.array, arrays)) for arrays in (opened, full)]
    mx.eval(expected)
    new = [mx.random.normal((1, 2, 1, 64), key=mx.random.key(seed)) for seed in range(2)]
    places = Places(ids([blocks.open_ids[0] * 256 + 255]), ids([1, 1]))
    mx.eval(seal(opened, full, ids(blocks.open_ids), ids(blocks.full_ids), append(new, opened, places, 64)))
    mx.eval(append(new, expected[0], places, 64))
    mx.eval(seal(expected[0], expected[1], ids(blocks.open_ids), ids(blocks.full_ids)))
    assert equal([*opened, *full], [*expected[0], *expected[1]])
    assert not equal(full, blocks.arrays()[1])


@pytest.mark.parametrize(("change", "source", "target"), [(sealing, "open_", ""), (reopening, "", "open_")])
def test_every_word_moves_once(change: Change, source: str, target: str, emulate: Emulate) -> None:
    log = emulate()
    change(Blocks.of(BlockCase(96, 2, 3)))
    [result] = log
    values = 3 * 2 * 256 * 96
    bits = {"open_": 8, "": 4}
    factors = {"open_k": values // 32, "k": values // 64, "open_v": values // 32, "v": values // 32}
    for side in ("k", "v"):
        assert result.traffic[f"{source}{side}q"].read == values * bits[source] // 8
        assert result.traffic[f"{target}{side}q"].written == values * bits[target] // 8
        for part in ("s", "b"):
            assert result.traffic[f"{target}{side}{part}"].written == 2 * factors[target + side]
            assert result.traffic[f"{source}{side}{part}"].read <= 2 * values // 8


SEAL_BUGS = [
    Bug("blocks left out", "i < blocks * (KEYS + VALUES)", "i < blocks * KEYS + VALUES", NUMBERS, SEAL),
    Bug("tail unguarded", "} else if (i < blocks * (KEYS + VALUES)) {", "} else {", "out-of-bounds", SEAL),
    Bug(
        "slot of another block",
        "targets[block]) * HEADS + head) * 256 + token;\n        uint words[16]",
        "targets[0]) * HEADS + head) * 256 + token;\n        uint words[16]",
        "race",
        SEAL,
    ),
    Bug(
        "source for target",
        "const size_t to = (size_t(targets[block]) * HEADS + head) * 256 + token;\n        uint",
        "const size_t to = from;\n        uint",
        NUMBERS,
        SEAL,
    ),
    Bug("range of 32 tokens", "for (int b = 4; b < 32; b <<= 1)", "for (int b = 4; b < 16; b <<= 1)", NUMBERS, SEAL),
    Bug(
        "range of other channels", "for (int b = 4; b < 32; b <<= 1)", "for (int b = 2; b < 32; b <<= 1)", NUMBERS, SEAL
    ),
    Bug(
        "simd operation under divergence",
        "                low[e] = metal::min(low[e], simd_shuffle_xor",
        "                if (lane % 8 < 4) low[e] = metal::min(low[e], simd_shuffle_xor",
        "divergent",
        SEAL,
    ),
    Bug("group off by one", "part / (UNITS / 4) % 4;", "part / (UNITS / 4) % 2;", "race", SEAL),
    Bug(
        "scale of another group",
        "factors_at<true, D, GS>(to, unit)",
        "factors_at<true, D, GS>(to / 256 * 256, unit)",
        "race",
        SEAL,
    ),
    Bug("scale of another channel", "ks + at, step", "ks + at / 32 * 32, step", "race", SEAL),
    Bug(
        "scale not rounded before",
        "step[e] = float(half(metal::max(range, 6.103515625e-5f)));",
        "step[e] = metal::max(range, 6.103515625e-5f);",
        NUMBERS,
        SEAL,
    ),
    Bug("bias not rounded before", "least[e] = float(half(low[e]));", "least[e] = low[e];", NUMBERS, SEAL),
    Bug(
        "steps below what the bias lost",
        "(high[e] - low[e]) / 15.0f, rounded)",
        "(high[e] - low[e]) / 15.0f, 0.0f)",
        NUMBERS,
        SEAL,
    ),
    Bug("steps too small for a half", "6.103515625e-5f", "1.0e-7f", NUMBERS, SEAL),
    Bug(
        "range of a token",
        "words + 2 * t, e), scale[t], bias[t]));\n                low[e]",
        "words, e), scale[t], bias[t]));\n                low[e]",
        NUMBERS,
        SEAL,
    ),
    Bug(
        "scale of the first token",
        "scale[t] = float(open_ks[at]);",
        "scale[t] = float(open_ks[at - 8 * t * (D / GS)]);",
        NUMBERS,
        SEAL,
    ),
    Bug(
        "rounded down", "metal::rint((x - least[e]) / step[e])", "metal::floor((x - least[e]) / step[e])", NUMBERS, SEAL
    ),
    Bug("sixteenth step", "metal::min(steps, 15.0f)", "metal::min(steps, 16.0f)", NUMBERS, SEAL),
    Bug("nibbles from the high end", "15.0f))) << (4 * e);", "15.0f))) << (28 - 4 * e);", NUMBERS, SEAL),
    Bug("keys as values", "load_words<8>(open_vq", "load_words<8>(open_kq", NUMBERS, SEAL),
    Bug(
        "values not limited",
        "x[e] = limited(metal::fma(code<8>(words, e), scale, bias));",
        "x[e] = metal::fma(code<8>(words, e), scale, bias);",
        NUMBERS,
        SEAL,
    ),
    Bug("registers too short", "float scale[8];", "float scale[7];", "undefined", SEAL),
    Bug("nothing to wait for", "if (i == 0) written[0] = 0;", "", "unwritten", SEAL),
    Bug("write to an input", "uint words[16];", "open_kb[0] = half(0); uint words[16];", SYNTAX, SEAL),
    Bug("double", "const float rounded", "const double rounded", SYNTAX, SEAL),
]
REOPEN_BUGS = [
    Bug("blocks left out", "if (i < blocks * (KEYS + VALUES))", "if (i < blocks * KEYS + VALUES)", NUMBERS, REOPEN),
    Bug("tail unguarded", "    if (i < blocks * (KEYS + VALUES)) {", "    {", "out-of-bounds", REOPEN),
    Bug("slot of another block", "size_t(targets[block])", "size_t(targets[0])", "race", REOPEN),
    Bug("group off by one", "own / UNITS / 8 % 4 * 64", "own / UNITS / 8 % 4 * 32", "race", REOPEN),
    Bug(
        "scale of another group",
        "load_factors<true>(ks + factors_at<true, D, GS>(from, unit)",
        "load_factors<true>(ks + factors_at<true, D, GS>(from / 256 * 256, unit)",
        NUMBERS,
        REOPEN,
    ),
    Bug("bias as scale", "load_factors<true>(kb +", "load_factors<true>(ks +", NUMBERS, REOPEN),
    Bug("one token for eight", "(from + 8 * t) * UNITS", "from * UNITS", NUMBERS, REOPEN),
    Bug("tokens over each other", "to + 8 * t, UNITS", "to + t, UNITS", "race", REOPEN),
    Bug("seven of eight tokens", "(is_key ? 8 : 1)", "(is_key ? 7 : 1)", NUMBERS, REOPEN),
    Bug("range of 4 bits", "(x, 8, words", "(x, 4, words", NUMBERS, REOPEN),
    Bug(
        "simd operation under divergence",
        "        low = metal::min(low, simd_shuffle_xor",
        "        if (x[0] > 0.0f) low = metal::min(low, simd_shuffle_xor",
        "divergent",
        REOPEN,
    ),
    Bug("values to the keys", "is_key ? open_kq : open_vq", "is_key ? open_kq : open_kq", "race", REOPEN),
    Bug("values from the keys", "= is_key ? kq : vq;", "= is_key ? kq : kq;", NUMBERS, REOPEN),
    Bug("nothing to wait for", "if (i == 0) written[0] = 0;", "", "unwritten", REOPEN),
    Bug("write to an input", "float own_bias;", "float own_bias; kb[0] = half(0);", SYNTAX, REOPEN),
]


@pytest.mark.parametrize("bug", firsts(SEAL_BUGS), ids=str)
def test_a_bug_in_sealing_is_caught(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: equal(*sealing(extreme(Blocks.of(ODD)))))


@pytest.mark.parametrize("bug", firsts(REOPEN_BUGS), ids=str)
def test_a_bug_in_reopening_is_caught(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: equal(*reopening(Blocks.of(ODD))))


@pytest.mark.parametrize("bugs", [SEAL_BUGS, REOPEN_BUGS], ids=["seal", "reopen"])
def test_there_are_enough_of_enough_classes(bugs: Sequence[Bug]) -> None:
    assert len({bug.kind for bug in bugs}) >= 10
    assert len({bug.caught_by for bug in bugs}) >= 5


def test_nothing_is_caught_where_nothing_is_planted(emulate: Emulate) -> None:
    emulate()
    assert caught(lambda: equal(*sealing(extreme(Blocks.of(ODD))))) == ()
    assert caught(lambda: equal(*reopening(Blocks.of(ODD)))) == ()
