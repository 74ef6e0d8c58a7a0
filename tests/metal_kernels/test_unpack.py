"""The unpack kernel against its definition, in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.block_cases import BlockCase, Blocks
from agentcache.metal_kernels.cases import Arenas, Case, as_computed, as_mlx, error
from agentcache.metal_kernels.definition import row_of
from agentcache.metal_kernels.unpack import unpack
from tests.marks import slow
from tests.metal_kernels.cases import DTYPES
from tests.metal_kernels.conftest import Emulate
from tests.metal_kernels.emulator.marks import needs_clang
from tests.metal_kernels.emulator.run import SCHEDULES, Schedule

pytestmark = needs_clang

Form = Callable[..., tuple[mx.array, np.ndarray]]
TOLERANCE = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1e-2}


def run(case: Case) -> tuple[mx.array, np.ndarray]:
    """The kernel's result, and what it is to be, both [1, H_kv, length, D]."""
    arenas = Arenas.of(case)
    [length], [ids] = case.lengths, arenas.block_ids
    out = unpack(as_mlx(arenas.keys), mx.array(np.array(ids, np.int32)), length, case.dtype)
    return out, as_computed(row_of(arenas.keys, ids, length), case.dtype)[None]


def run_by_channel(case: BlockCase, length: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, np.ndarray]:
    """Keys of full blocks, as `run`."""
    blocks = Blocks.of(replace(case, num_blocks=-(-length // 256)))
    _, full = blocks.arrays()
    out = unpack((full[0], full[1], full[2]), mx.array(blocks.full_ids, mx.int32), length, dtype)
    return out, blocks.keys.full_row(blocks.full_ids, length)[None]


def run_open(case: BlockCase, length: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, np.ndarray]:
    """Values of open blocks, as `run`."""
    blocks = Blocks.of(replace(case, num_blocks=-(-length // 256)))
    opened, _ = blocks.arrays()
    out = unpack((opened[3], opened[4], opened[5]), mx.array(blocks.open_ids, mx.int32), length, dtype, bits=8)
    return out, blocks.values.open_row(blocks.open_ids, length)[None]


def run_mixed(case: BlockCase, length: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, np.ndarray]:
    """Keys whose first and last blocks are open, as `run`."""
    blocks = Blocks.of(replace(case, num_blocks=max(2, -(-length // 256))))
    (a, b, c, *_), (data, scales, biases, *_) = blocks.arrays()
    ends = (0, -(-length // 256) - 1)
    pairs = zip(blocks.open_ids, blocks.full_ids, strict=True)
    ids = [-1 - opened if at in ends else full for at, (opened, full) in enumerate(pairs)]
    of_open, of_full = blocks.keys.open_row(blocks.open_ids, length), blocks.keys.full_row(blocks.full_ids, length)
    is_open = np.isin(np.arange(length) // 256, ends)[None, :, None]
    out = unpack((data, scales, biases), mx.array(ids, mx.int32), length, dtype, opened=(a, b, c))
    return out, np.where(is_open, of_open, of_full)[None]


# Every size of heads in one type, and two of them in each.
SHAPES = [
    (dtype, dim) if (dtype == mx.float32 and dim in (64, 96)) or dim == 256 else slow(dtype, dim)
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


FORMS = [run_by_channel, run_open, run_mixed]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "dim"), [*SHAPES, slow(mx.float32, 32)], ids=str)
def test_every_shape_of_other_forms(form: Form, dim: int, dtype: mx.Dtype, emulate: Emulate) -> None:
    emulate()
    out, expected = form(BlockCase(dim), 257, dtype)
    assert out.dtype == dtype
    assert error(out, as_computed(expected, dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, slow(8), slow(63), 64, 65, slow(255), slow(256), 700])
def test_every_length_of_other_forms(form: Form, length: int, emulate: Emulate) -> None:
    emulate()
    out, expected = form(BlockCase(64, 3, group=32), length)
    assert error(out, expected) <= 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_finding_in_any_schedule_of_other_forms(schedule: Schedule, form: Form, emulate: Emulate) -> None:
    emulate(schedule)
    out, expected = form(BlockCase(96, 3), 37, mx.float16)
    assert error(out, expected) <= 2e-3


def test_every_word_by_channel_is_read_once_and_a_scale_by_eight_threads(emulate: Emulate) -> None:
    log = emulate()
    run_by_channel(BlockCase(96), 512, mx.float16)
    [result] = log
    assert result.traffic["data"].read == 512 * 2 * 96 // 2
    assert result.traffic["scales"].read == result.traffic["biases"].read == 8 * 8 * 2 * 96 * 2
    assert result.traffic["out"].written == 512 * 2 * 96 * 2


def test_every_byte_of_open_blocks_is_read_once(emulate: Emulate) -> None:
    log = emulate()
    run_open(BlockCase(96), 257, mx.float16)
    [result] = log
    assert sum(result.traffic[name].read for name in ("data", "scales", "biases")) == 257 * 2 * (96 + 96 // 32 * 4)
