"""The unpack kernel against its definition, in the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.cases import Arenas, Case, as_computed, as_mlx, error
from agentcache.metal_kernels.definition import row_of
from agentcache.metal_kernels.unpack import unpack
from tests.marks import slow
from tests.metal_kernels.cases import DTYPES
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Schedule

pytestmark = needs_clang

TOLERANCE = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1e-2}


def run(case: Case) -> tuple[mx.array, np.ndarray]:
    """The kernel's result, and what it is to be, both [1, H_kv, length, D]."""
    arenas = Arenas.of(case)
    [length], [ids] = case.lengths, arenas.block_ids
    out = unpack(as_mlx(arenas.keys), mx.array(np.array(ids, np.int32)), length, case.dtype)
    return out, as_computed(row_of(arenas.keys, ids, length), case.dtype)[None]


# Every size of heads in one type, and two of them in each.
SHAPES = [
    (dtype, dim) if dtype == mx.float32 or dim in (96, 256) else slow(dtype, dim)
    for dtype in DTYPES
    for dim in (64, 96, 128, 192, 256)
]


@pytest.mark.parametrize(("dtype", "dim"), SHAPES, ids=str)
def test_every_shape(dim: int, dtype: mx.Dtype, emulate: Emulate) -> None:
    emulate()
    out, expected = run(Case(dim, 2, dtype=dtype, lengths=(257,)))
    assert out.dtype == dtype
    assert error(out, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("length", [1, 255, 256, 4095])
def test_every_length(length: int, emulate: Emulate) -> None:
    emulate()
    out, expected = run(Case(64, lengths=(length,)))
    assert error(out, expected) <= 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_finding_in_any_schedule(schedule: Schedule, emulate: Emulate) -> None:
    emulate(schedule)
    out, expected = run(Case(96, 3, dtype=mx.float16, lengths=(37,)))
    assert error(out, expected) <= 2e-3


def test_every_packed_byte_is_read_once(emulate: Emulate) -> None:
    log = emulate()
    run(Case(96, 2, dtype=mx.float16, lengths=(257,)))
    [result] = log
    assert sum(result.traffic[name].read for name in ("data", "scales", "biases")) == 257 * 2 * (96 // 2 + 96 // 32 * 4)
    assert result.traffic["out"].written == 257 * 2 * 96 * 2
