"""Decoding with keys by channel, and in 8 bits, against its definition, in the emulator."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, as_computed, as_mlx, error
from agentcache.metal_kernels.decode import decode
from agentcache.metal_kernels.decode_plan import DecodePlan, StepRows
from agentcache.metal_kernels.definition import unpacked, unpacked_by_channel
from agentcache.metal_kernels.tiling import TILE, own_tiling
from tests.marks import slow
from tests.metal_kernels.cases import DTYPES, ids, lengths_of
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Result, Schedule
from tests.metal_kernels.test_planted_bugs import AFTER_KEYS, BARRIERS, NUMBERS, SYNTAX, Bug, caught, firsts
from tests.metal_kernels.test_planted_bugs import decoded_right as decodes_right

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32


def by_channel(*cases: Case) -> list[Case]:
    return [replace(case, by_channel=True) for case in cases]


SHAPES = by_channel(
    Case(64, 2, 1, F32, (40, 256)),
    Case(64, 2, 16, BF16, (300, 513)),
    Case(96, 2, 3, F16, (270, 40)),
    Case(128, 2, 4, BF16, (600, 255)),
    Case(192, 1, 12, BF16, (300,)),
    Case(256, 1, 16, F16, (260,)),
    Case(32, 1, 2, F32, (300,)),
    Case(96, 1, 8, F32, (257,)),
    Case(128, 1, 7, F32, (529,)),
    Case(160, 1, 4, F16, (300,)),
    Case(192, 1, 2, F32, (290,)),
    Case(224, 1, 1, F32, (290,)),
    Case(256, 1, 5, F32, (257,)),
    Case(256, 1, 1, F16, (600,), value_bits=8),
)
FEATURES = by_channel(
    Case(64, lengths=(700, 90), window=100),
    Case(64, lengths=(300, 700, 250), window=256, num_tokens=9),
    Case(64, lengths=(530, 520), window=15, dtype=F16),
    Case(64, dtype=F16, lengths=(250, 280, 511, 0), num_tokens=8),
    Case(64, gqa=1, lengths=(240,), num_tokens=32),
    Case(64, lengths=(40, 300), softcap=5.0),
    Case(64, lengths=(40, 300), sinks=True, num_tokens=2),
    Case(64, dtype=BF16, lengths=(270,), window=64, softcap=5.0, sinks=True, num_tokens=5),
    Case(64, 2, group=32, lengths=(300,)),
)
PREFIXES = by_channel(
    Case(64, 1, 4, F16, (600, 777, 512), prefix=2),
    Case(64, 1, 4, F32, (300, 290), prefix=1, num_tokens=2),
    Case(96, 1, 1, BF16, (256, 300, 400), prefix=1, sinks=True),
    Case(128, 1, 16, F16, (256, 257, 300, 301, 302), prefix=1),
    Case(192, 1, 4, F32, (280, 290), prefix=1),
    Case(256, 1, 4, F16, (280, 290), prefix=1, softcap=5.0),
    Case(64, 1, 4, F16, (500, 510), prefix=1, num_tokens=16),
)
RESIDUALS = by_channel(
    Case(64, 2, 3, F16, (300, 700), 3, 250, None, True, value_rank=8, key_rank=8, pairs=32, normed=True),
    Case(64, 2, 2, F32, (254, 40), 4, value_rank=3, key_rank=5, pairs=32),
    Case(64, 1, 2, F32, (4090,), value_rank=3),
    Case(128, 1, 4, BF16, (300,), value_rank=16, key_rank=16, pairs=64, interleaved=True),
    Case(256, 1, 16, F16, (290,), value_rank=64, key_rank=64, pairs=128, normed=True),
)
EIGHT_BITS = [
    Case(64, 2, 3, F32, (300, 40), bits=8, value_bits=8),
    Case(128, 1, 4, F16, (300, 700), bits=8, num_tokens=3, window=280),
    Case(96, 1, 4, BF16, (300,), bits=8, value_bits=8, value_rank=8),
    Case(256, 1, 2, F16, (280, 290), bits=8, value_bits=8, prefix=1),
    Case(64, 1, 2, F16, (280, 290), value_bits=8, prefix=1),
]
CASES = [*SHAPES, *FEATURES, *PREFIXES, *RESIDUALS, *EIGHT_BITS]
ALWAYS = [*SHAPES[:3], FEATURES[1], PREFIXES[0], RESIDUALS[0], EIGHT_BITS[0]]


@needs_clang
@pytest.mark.parametrize("case", [case if case in ALWAYS else slow(case) for case in CASES], ids=ids(CASES))
def test_every_shape_and_feature(case: Case, emulate: Emulate) -> None:
    log = emulate()
    arenas = Arenas.of(case)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[case.dtype]
    if case in SHAPES:
        assert read(log[0], "kq") == of_full(case, case.dim // 2), "every packed byte is read once a row"
        assert read(log[0], "vq", "vs", "vb") == of_full(case, side_bytes(case, case.value_bits))
        assert read(log[0], "okq", "oks", "okb") == of_open(case, side_bytes(case, 8))
        assert read(log[0], "ovq", "ovs", "ovb") == of_open(case, side_bytes(case, 8))
        assert read(log[0], "ks", "kb") == of_full(case, 4 * case.dim) // TILE * repeated(case.dim)


def of_full(case: Case, size: int) -> int:
    return case.kv_heads * sum(case.own_block(length) for length in case.lengths) * size


def of_open(case: Case, size: int) -> int:
    return case.kv_heads * sum(length + 1 - case.own_block(length) for length in case.lengths) * size


def side_bytes(case: Case, bits: int) -> int:
    """Of a token's keys or values, quantised by token."""
    return case.dim * bits // 8 + case.dim // case.group_size * 4


def repeated(dim: int) -> int:
    """Lanes of a simdgroup that load the same channels' scales, at once."""
    return 32 // (dim // 8)


def read(result: Result, *names: str) -> int:
    return sum(result.traffic[name].read for name in names)


CUTS = [(length, rows) for length in (1, 16, 17, 64, 65, 255, 256, 257, 272, 321, 512, 4095, 4102) for rows in (1, 3)]
KEPT = ((1, 3), (17, 1), (256, 1), (257, 3), (272, 1), (321, 1))


@needs_clang
@pytest.mark.parametrize(("length", "rows"), [cut if cut in KEPT else slow(*cut) for cut in CUTS], ids=str)
def test_every_length_and_number_of_rows(length: int, rows: int, emulate: Emulate) -> None:
    emulate(Schedule(check=length * rows <= 1024))
    case = Case(64, gqa=2, lengths=lengths_of(length, rows), seed=length + rows, by_channel=True)
    arenas = Arenas.of(case)
    for threadgroups in (1, 3, 64):
        assert error(arenas.decoded(threadgroups), arenas.expected()) <= TOLERANCE[F32]


SCHEDULED = by_channel(
    Case(64, 1, 4, F32, (250, 40), num_tokens=12, sinks=True),
    Case(96, 1, 3, F16, (300, 700), window=64),
    Case(64, 1, 4, F16, (300, 290), prefix=1, softcap=5.0),
)


@needs_clang
@pytest.mark.parametrize("schedule", [*map(slow, SCHEDULES[:-1]), SCHEDULES[-1]], ids=str)
@pytest.mark.parametrize("case", [SCHEDULED[0], *map(slow, SCHEDULED[1:])], ids=ids(SCHEDULED))
def test_no_finding_in_any_schedule(case: Case, schedule: Schedule, emulate: Emulate) -> None:
    emulate(schedule)
    arenas = Arenas.of(case)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[case.dtype]


@needs_clang
def test_a_window_reads_no_more_than_itself(emulate: Emulate) -> None:
    log = emulate()
    case = Case(64, lengths=(700, 300, 90), window=100, by_channel=True)
    Arenas.of(case).decoded()
    # 601 … 700 and 0 … 90 lie in open blocks, and of 201 … 300 the last 45.
    assert read(log[0], "kq") == 64 * case.dim // 2, "tiles of 16 tokens by channel"
    assert read(log[0], "vq", "vs", "vb") == 55 * side_bytes(case, 4)
    assert read(log[0], "okq", "oks", "okb") == (100 + 45 + 91) * side_bytes(case, 8)


@needs_clang
def test_a_shared_prefix_is_read_once_for_all_rows(emulate: Emulate) -> None:
    log = emulate()
    case = Case(64, 1, 4, F16, (600, 777, 512), prefix=2, by_channel=True)
    Arenas.of(case).decoded()
    own, shared, _ = log
    assert read(shared, "kq") == 2 * 256 * case.dim // 2
    assert read(own, "kq") == 256 * case.dim // 2, "the third block of the row of 777"
    assert read(shared, "okq", "ovq") == 0
    assert read(own, "okq") == (89 + 10 + 1) * case.dim


@needs_clang
@pytest.mark.parametrize("dtype", [DTYPES[0], *map(slow, DTYPES[1:])], ids=str)
def test_results_do_not_depend_on_the_number_of_tokens_in_a_step(dtype: mx.Dtype, emulate: Emulate) -> None:
    emulate(Schedule(check=False))
    arenas = Arenas.of(Case(64, 1, 2, dtype, (508,), num_tokens=8, by_channel=True))
    assert arenas.open_blocks is not None
    at_once = arenas.decoded()
    [full], [opened] = arenas.block_ids, arenas.open_blocks.block_ids
    for token in range(8):
        position = 508 + token
        slot = opened[position // 256 - 1]
        rows = StepRows([full[: position // 256]], [0], [position], 1, open_ids=[[slot]])
        alone = decode(
            arenas.computed_queries()[:, :, token : token + 1],
            as_mlx(arenas.keys),
            as_mlx(arenas.values),
            DecodePlan(arenas.case.shape, rows),
            scale=arenas.case.scale,
            open_keys=as_mlx(arenas.open_blocks.keys),
            open_values=as_mlx(arenas.open_blocks.values),
        )
        assert error(alone[:, :, 0], np.array(at_once[:, :, token].astype(mx.float32))) <= TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 70])
def test_the_definition_is_the_rule(window: int | None) -> None:
    """By positions alone: a query reads keys of its own block in 8 bits, earlier ones by channel."""
    case = Case(32, 1, 1, F32, (505,), num_tokens=12, window=window, by_channel=True)
    arenas = Arenas.of(case)
    opened = arenas.open_blocks
    assert opened is not None
    [full], [base] = arenas.block_ids, arenas.bases
    sealed = [unpacked_by_channel(arenas.keys), unpacked(arenas.values)]
    in_bytes = [unpacked(opened.keys, 8), unpacked(opened.values, 8)]
    queries = as_computed(arenas.queries, F32)
    for token in range(12):
        q = 505 + token
        visible = range(0 if window is None else q - window + 1, q + 1)
        of_side = []
        for side in (0, 1):
            own = [
                in_bytes[side][opened.block_ids[0][t // 256 - 1], 0, t % 256] for t in visible if t // 256 == q // 256
            ]
            before = [sealed[side][full[(t - base) // 256], 0, t % 256] for t in visible if t // 256 != q // 256]
            of_side.append(np.array(before + own))
        weights = np.exp(of_side[0] @ queries[0, 0, token] * case.scale)
        assert np.allclose(arenas.expected()[0, 0, token], weights / weights.sum() @ of_side[1])


def test_the_forms_differ_by_more_than_the_tolerance() -> None:
    arenas = Arenas.of(Case(64, 1, 2, F32, (300,), by_channel=True))
    opened = arenas.open_blocks
    assert opened is not None
    others = (
        replace(arenas, keys=(arenas.keys[0], np.roll(arenas.keys[1], 1, axis=2), arenas.keys[2])),
        replace(arenas, open_blocks=replace(opened, keys=opened.values)),
    )
    for other in others:
        with np.errstate(invalid="ignore"):
            difference = np.abs(other.expected() - arenas.expected()).max()
        assert not difference < 0.01


def test_threadgroup_memory_does_not_depend_on_the_form() -> None:
    for case in CASES:
        shape = case.shape
        plain = replace(shape, by_channel=False, bits=4, value_bits=4)
        assert own_tiling(shape, 1) == own_tiling(plain, 1)
        assert own_tiling(shape, 1).pool_size(shape) == own_tiling(plain, 1).pool_size(plain)


# -- planted bugs -------------------------------------------------------------------------------------------------

[ROWS, OF_LANES] = by_channel(
    Case(64, 2, 3, F32, (700, 300, 40), num_tokens=2, window=490, sinks=True),
    Case(96, 1, 2, F16, (400,)),
)
[BYTES] = [Case(64, 1, 2, F32, (300,), bits=8, value_bits=8)]
BUGS = [
    Bug("barrier missing", f"{BARRIERS}{AFTER_KEYS}", AFTER_KEYS, "race"),
    Bug("group of 64 off by one", "rows.row / 64 * D", "(rows.row / 64 ^ 1) * D", NUMBERS),
    Bug("group beyond the block", "rows.row / 64 * D", "(rows.row / 64 + 1) * D", "out-of-bounds"),
    Bug("scale of the block's first group", "rows.row / 64 * D", "rows.row / 256 * 4 * D", NUMBERS),
    Bug("scale of another channel", "/ 64 * D + column * 8;", "/ 64 * D + column / 2 * 16;", NUMBERS),
    Bug("scale and bias exchanged", "load8(biases + at, tile.bias);", "load8(scales + at, tile.bias);", NUMBERS),
    Bug("bias of another value", "float(bias[4 * i + e]));", "float(bias[e]));", NUMBERS),
    Bug(
        "nibbles from the high end",
        "float((word >> (16 * i + 4 * e)) & 15u), float(scale[",
        "float((word >> (28 - 16 * i - 4 * e)) & 15u), float(scale[",
        NUMBERS,
    ),
    Bug("bytes from the high end", ">> (8 * e)) & 255u), float", ">> (24 - 8 * e)) & 255u), float", NUMBERS),
    Bug("words exchanged", "float(((i == 0 ? first : second)", "float(((i == 1 ? first : second)", NUMBERS),
    Bug("open slot of another row", "= spans[5 * group + 3];", "= spans[3];", NUMBERS),
    Bug("open values of another row", "ovb, slot, head", "ovb, spans[3], head", NUMBERS),
    Bug("own block read from full blocks", "own_slot >= 0 ? (end - 1) / 256 * 256 : end;", "false ? 0 : end;", NUMBERS),
    Bug("block before read as open", "(end - 1) / 256 * 256 : end;", "(end - 257) / 256 * 256 : end;", NUMBERS),
    Bug("straddling tiles", "sealed / ROUND * ROUND + split", "sealed + split", "out-of-bounds"),
    Bug("tokens before the window", "rows.first = metal::max(0, from - place);", "rows.first = 0;", NUMBERS),
    Bug("open tail unguarded", "rows.last = metal::min(16, stop - place);", "rows.last = 16;", NUMBERS),
    Bug("token of another lane", "(rows.row + token) * WORDS + column", "(rows.row + u) * WORDS + column", NUMBERS),
    Bug("tokens not staged", "if (lane < WORDS * AT_ONCE) {", "if (lane < WORDS * AT_ONCE - 1) {", "uninitialised"),
    Bug(
        "register array too short",
        "half scale[8];\n    half bias[8];",
        "half scale[4];\n    half bias[8];",
        "undefined",
    ),
    Bug("two simdgroups, one tile", "stage_tile(stage + sg * 16 * LD, LD, keys", "stage_tile(stage, LD, keys", "race"),
    Bug(
        "pointer without address space",
        "int width, const device uint* data, const device half* scales,",
        "int width, const uint* data, const device half* scales,",
        SYNTAX,
    ),
]
LANE_BUGS = [
    Bug("lanes without a column", "if (lane < WORDS * AT_ONCE) {", "if (true) {", "race"),
    Bug(
        "tokens of another load",
        "u * AT_ONCE + lane / WORDS;\n        tile",
        "u + lane / WORDS;\n        tile",
        NUMBERS,
    ),
]
BYTE_BUGS = [
    Bug("words of another eight", "tile.words + u * WORDS + e * BITS / 4", "tile.words + u * WORDS + e", NUMBERS),
    Bug("half of the words", "unpack_bytes(to, words[0], words[1]", "unpack_bytes(to, words[0], words[0]", NUMBERS),
]


@needs_clang
@pytest.mark.parametrize("bug", firsts(BUGS), ids=str)
def test_a_planted_bug_is_caught(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decodes_right(ROWS))


@needs_clang
@pytest.mark.parametrize("bug", firsts(LANE_BUGS), ids=str)
def test_a_planted_bug_is_caught_where_lanes_are_left_over(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decodes_right(OF_LANES))


@needs_clang
@pytest.mark.parametrize("bug", firsts(BYTE_BUGS), ids=str)
def test_a_planted_bug_is_caught_in_eight_bits(bug: Bug, emulate: Emulate) -> None:
    emulate(edits={bug.kernel: bug.plant})
    assert bug.caught_by in caught(lambda: decodes_right(BYTES))


def test_there_are_enough_of_enough_classes() -> None:
    assert len({bug.kind for bug in BUGS}) >= 10
    assert len({bug.caught_by for bug in BUGS}) >= 6


@pytest.mark.slow
@needs_clang
def test_nothing_is_caught_where_nothing_is_planted(emulate: Emulate) -> None:
    emulate()
    assert caught(lambda: decodes_right(ROWS)) == caught(lambda: decodes_right(OF_LANES)) == ()
    assert caught(lambda: decodes_right(BYTES)) == ()
