"""The decode kernels against their definition, in the emulator: numbers, findings, and the bytes they move."""

from __future__ import annotations

import mlx.core as mx
import pytest

from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, error
from tests.marks import slow
from tests.metal_kernels.cases import DTYPES, ids, lengths_of
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Schedule, Traffic

pytestmark = needs_clang

QUICK = Schedule(check=False)
F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32

SHAPES = [
    Case(64, 2, 1, F32, (40, 256)),
    Case(64, 2, 16, BF16, (40, 256)),
    Case(96, 2, 3, F16, (40, 256)),
    Case(96, 1, 8, F32, (257,)),
    Case(128, 2, 4, BF16, (40, 256)),
    Case(128, 1, 7, F32, (257,)),
    Case(192, 1, 2, F32, (257,)),
    Case(192, 1, 12, BF16, (40,)),
    Case(256, 1, 16, F16, (40,)),
    Case(256, 1, 5, F32, (257,)),
]
FEATURES = [
    Case(64, lengths=(700, 90), window=100),
    Case(64, lengths=(300, 700), window=256, num_tokens=3),
    Case(64, dtype=F16, lengths=(20, 280), num_tokens=8),
    Case(64, lengths=(40, 300), softcap=5.0),
    Case(64, lengths=(40, 300), sinks=True, num_tokens=2),
    Case(64, dtype=BF16, lengths=(270,), window=64, softcap=5.0, sinks=True, num_tokens=5),
]
PREFIXES = [
    Case(64, 1, 4, F16, (600, 777, 512), prefix=2),
    Case(64, 1, 4, F32, (300, 290), prefix=1, num_tokens=2),
    Case(96, 1, 1, BF16, (256, 300, 400), prefix=1, sinks=True),
    Case(128, 1, 16, F16, (256, 257, 300, 301, 302), prefix=1),
    Case(192, 1, 4, F32, (280, 290), prefix=1),
    Case(256, 1, 4, F16, (280, 290), prefix=1, softcap=5.0),
]
CASES = [*SHAPES, *FEATURES, *PREFIXES]
# Sizes of heads, types, and all that a step can have, each once; of 16-bit types some.
ALWAYS = [*SHAPES[:5:2], SHAPES[1], SHAPES[8], FEATURES[1], FEATURES[5], *PREFIXES[:2]]


@pytest.mark.parametrize("case", [case if case in ALWAYS else slow(case) for case in CASES], ids=ids(CASES))
def test_every_shape_and_feature(case: Case, emulate: Emulate) -> None:
    log = emulate()
    arenas = Arenas.of(case)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[case.dtype]
    if case in SHAPES:
        tokens = sum(length + 1 for length in case.lengths)
        assert read(log[0].traffic) == tokens * bytes_per_token(case), "every packed byte is read once a row"


# How a step is cut depends on lengths and rows and on no type: all of them with one, few with the others.
CUTS = [(length, rows) for length in (1, 255, 256, 257, 4095) for rows in (1, 3, 16)]
# Many rows that are long, and other types, show no other cut.
TYPED_CUTS = [
    (length, rows, dtype)
    if dtype == F32 and ((length, rows) == (257, 16) or (rows < 16 and (length, rows) != (4095, 3)))
    else slow(length, rows, dtype)
    for dtype in DTYPES
    for length, rows in CUTS
]


@pytest.mark.parametrize(("length", "rows", "dtype"), TYPED_CUTS, ids=str)
def test_every_length_and_number_of_rows(length: int, rows: int, dtype: mx.Dtype, emulate: Emulate) -> None:
    emulate(QUICK if length * rows > 4096 else Schedule())
    case = Case(64, gqa=2, dtype=dtype, lengths=lengths_of(length, rows), seed=length + rows)
    arenas = Arenas.of(case)
    assert error(arenas.decoded(threadgroups=3), arenas.expected()) <= TOLERANCE[dtype]


SCHEDULED = [
    Case(64, 1, 4, F32, (130, 40), num_tokens=2, sinks=True),
    Case(96, 1, 3, F16, (90, 300), window=64),
    Case(64, 1, 4, F16, (300, 290), prefix=1, softcap=5.0),
]


# Each schedule once and each case once.
SCHEDULED_PAIRS = [
    (case, schedule) if number in (0, place) else slow(case, schedule)
    for number, case in enumerate(SCHEDULED)
    for place, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("case", "schedule"), SCHEDULED_PAIRS, ids=str)
def test_no_finding_in_any_schedule(case: Case, schedule: Schedule, emulate: Emulate) -> None:
    emulate(schedule)
    arenas = Arenas.of(case)
    assert error(arenas.decoded(), arenas.expected()) <= TOLERANCE[case.dtype]


PACKED = ("kq", "ks", "kb", "vq", "vs", "vb")


def bytes_per_token(case: Case) -> int:
    return 2 * case.kv_heads * (case.dim // 2 + case.dim // case.group_size * 4)


def test_a_window_reads_no_more_than_itself(emulate: Emulate) -> None:
    log = emulate()
    case = Case(64, lengths=(700, 90), window=100)
    Arenas.of(case).decoded()
    assert read(log[0].traffic) == (100 + 91) * bytes_per_token(case)


def test_a_shared_prefix_is_read_once_for_all_rows(emulate: Emulate) -> None:
    log = emulate()
    case = Case(64, 1, 4, F16, (600, 777, 512), prefix=2)
    Arenas.of(case).decoded()
    own, shared, _ = log
    assert read(shared.traffic) == 2 * 256 * bytes_per_token(case)
    assert read(own.traffic) == (89 + 266 + 1) * bytes_per_token(case)


def test_bytes_written_do_not_depend_on_the_context(emulate: Emulate) -> None:
    log = emulate(Schedule())
    for length in (200, 2000):
        Arenas.of(Case(64, lengths=(length,))).decoded(threadgroups=2)
    short, long = (sum(moved.written for moved in result.traffic.values()) for result in log[::2])
    assert short == long


def read(traffic: dict[str, Traffic]) -> int:
    return sum(traffic[name].read for name in PACKED)
