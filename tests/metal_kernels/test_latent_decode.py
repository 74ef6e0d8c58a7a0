"""The kernel for latents against its definition, in the emulator: numbers, findings, and the bytes it moves."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.append import packed_alone
from agentcache.metal_kernels.cases import TOLERANCE, LatentCase, Latents, as_mlx, error
from agentcache.metal_kernels.definition import row_of
from agentcache.metal_kernels.latent_decode import LatentShape, LatentTiling
from agentcache.metal_kernels.unpack import unpack
from tests.marks import slow
from tests.metal_kernels.cases import DTYPES, LATENT_SHAPES, ids, lengths_of
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Schedule, Traffic

pytestmark = needs_clang

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
PACKED = ("data", "scales", "biases")
# In the type and the size that is served most, in float with half as many tokens at a time, and in 8 bits.
ALWAYS = LATENT_SHAPES[:4]


@pytest.mark.parametrize(
    "case", [case if case in ALWAYS else slow(case) for case in LATENT_SHAPES], ids=ids(LATENT_SHAPES, LatentCase())
)
def test_every_shape(case: LatentCase, emulate: Emulate) -> None:
    log = emulate()
    latents = Latents.of(case)
    out = latents.decoded()
    assert out.dtype == case.dtype
    assert error(out, latents.expected()) <= TOLERANCE[case.dtype]
    tokens = sum((length + 1 + at) for length in case.lengths for at in range(case.num_tokens))
    once = tokens * bytes_per_token(case.shape)
    assert read(log[0].traffic) == once * LatentTiling(case.shape).head_groups, "once a query and group of heads"


# How a step is cut depends on lengths and rows and on no type: all of them with one, few with the others.
CUTS = [(length, rows) for length in (1, 255, 256, 257, 4095) for rows in (1, 3)]
TYPED_CUTS = [
    (length, rows, dtype) if dtype == F32 or (length, rows) == (257, 3) else slow(length, rows, dtype)
    for dtype in DTYPES
    for length, rows in CUTS
]


@pytest.mark.parametrize(("length", "rows", "dtype"), TYPED_CUTS, ids=str)
def test_every_length_and_number_of_rows(length: int, rows: int, dtype: mx.Dtype, emulate: Emulate) -> None:
    emulate(Schedule(check=length * rows <= 4096))
    latents = Latents.of(LatentCase(heads=3, dtype=dtype, lengths=lengths_of(length, rows), seed=length + rows))
    assert error(latents.decoded(threadgroups=9), latents.expected()) <= TOLERANCE[dtype]


SCHEDULED = [
    LatentCase(64, 32, 3, F32, (70, 20), num_tokens=2),
    LatentCase(128, 64, 20, F16, (40, 90)),
    LatentCase(64, 32, 3, F16, (70,), bits=8),
    slow(LatentCase(512, 64, 3, F32, (20,))),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("case", SCHEDULED, ids=str)
def test_no_finding_in_any_schedule(case: LatentCase, schedule: Schedule, emulate: Emulate) -> None:
    emulate(schedule)
    latents = Latents.of(case)
    assert error(latents.decoded(), latents.expected()) <= TOLERANCE[case.dtype]


def test_bytes_written_do_not_depend_on_the_context(emulate: Emulate) -> None:
    log = emulate()
    for length in (200, 1200):
        Latents.of(LatentCase(lengths=(length,))).decoded(threadgroups=2)
    short, long = (sum(moved.written for moved in result.traffic.values()) for result in log[::2])
    assert short == long


@pytest.mark.parametrize("rank", [slow(64), 512])
def test_latents_are_unpacked_and_appended_by_the_kernels_for_keys(rank: int, emulate: Emulate) -> None:
    emulate()
    case = LatentCase(rank, 64, 4, F32, (270,))
    latents = Latents.of(case)
    [table] = latents.block_ids
    out = unpack(as_mlx(latents.packed), mx.array(np.array(table, np.int32)), 261, F32)
    expected = row_of(latents.packed, table, 261)
    assert error(out[0], expected) <= 1e-6
    packed = packed_alone(out[:, :, :9], 64)
    for made, wanted in zip(packed, mx.quantize(out[:, :, :9], group_size=64, bits=4), strict=True):
        assert mx.array_equal(made, wanted.astype(made.dtype))


# Of Metal's 32 KiB; CUDA's static limit is 48.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 64), (128, 64), (64, 32), (64, 64)])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_there_is_room_for_every_size(rank: int, rope: int, heads: int, dtype: mx.Dtype) -> None:
    tiling = LatentTiling(LatentShape(rank, rope, heads, 32, dtype))
    assert tiling.fits
    assert tiling.tokens == (8 if dtype == F32 and rank == 512 else 16)
    assert tiling.simdgroups * 32 <= 288
    assert tiling.head_groups * 8 * tiling.tiles >= heads


def test_there_is_none_for_much_larger_ones() -> None:
    assert not LatentTiling(LatentShape(1024, 64, 16, 64, F16)).fits


def bytes_per_token(shape: LatentShape) -> int:
    return shape.dim * shape.bits // 8 + shape.dim // shape.group_size * 4


def read(traffic: dict[str, Traffic]) -> int:
    return sum(traffic[name].read for name in PACKED)
