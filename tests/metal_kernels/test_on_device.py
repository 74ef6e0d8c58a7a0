"""The kernels where they are compiled for real: Metal or CUDA."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from agentcache.metal_kernels.block_cases import BlockCase, Blocks, unpacked_with_residuals
from agentcache.metal_kernels.cases import TOLERANCE, Arenas, Case, LatentCase, Latents, as_computed, as_mlx, error
from agentcache.metal_kernels.definition import row_of
from agentcache.metal_kernels.kernel_text import NO_DEVICE, device
from agentcache.metal_kernels.self_test import reopen_error, seal_error
from agentcache.metal_kernels.unpack import unpack
from tests.metal_kernels.cases import (
    BLOCK_CASES,
    DECODE_CASES,
    DTYPES,
    FIRST_CASES,
    FORM_CASES,
    KEY_RESIDUAL_CASES,
    LATENT_CASES,
    RESIDUAL_CASES,
    UNPACK_CASES,
    UNPACK_RESIDUAL_CASES,
    ids,
)

pytestmark = pytest.mark.device
if device() == NO_DEVICE:
    pytest.skip("the kernels need Metal or CUDA", allow_module_level=True)


DECODED = [*DECODE_CASES, *RESIDUAL_CASES, *KEY_RESIDUAL_CASES, *FORM_CASES, *FIRST_CASES]


@pytest.mark.parametrize("case", DECODED, ids=ids(DECODED))
def test_decode_equals_its_definition(case: Case) -> None:
    arenas = Arenas.of(case)
    expected = arenas.expected()
    errors = [error(arenas.decoded(threadgroups), expected) for threadgroups in (1, 64)]
    assert max(errors) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", UNPACK_CASES, ids=ids(UNPACK_CASES))
def test_unpacked_equals_its_definition(case: Case) -> None:
    arenas = Arenas.of(case)
    [length], [block_ids] = case.lengths, arenas.block_ids
    out = unpack(as_mlx(arenas.keys), mx.array(np.array(block_ids, np.int32)), length, case.dtype)
    expected = as_computed(row_of(arenas.keys, block_ids, length), case.dtype)
    assert error(out[0], expected) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", UNPACK_RESIDUAL_CASES, ids=ids(UNPACK_RESIDUAL_CASES))
@pytest.mark.parametrize("side", ["keys", "values"])
def test_unpacked_with_residuals_equals_its_definition(case: Case, side: str) -> None:
    out, expected = Arenas.of(case).unpacked(side)
    assert error(out, expected) <= TOLERANCE[case.dtype] * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize("opened", [False, True], ids=["full", "open"])
@pytest.mark.parametrize("case", UNPACK_RESIDUAL_CASES, ids=ids(UNPACK_RESIDUAL_CASES))
@pytest.mark.parametrize("side", ["keys", "values"])
def test_full_and_open_blocks_with_residuals_equal_their_definition(case: Case, side: str, opened: bool) -> None:
    out, expected = unpacked_with_residuals(case, side, opened)
    assert error(out, expected) <= TOLERANCE[case.dtype] * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize("length", [1, 64, 257, 700])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", BLOCK_CASES, ids=str)
def test_full_and_open_blocks_equal_their_definition(case: BlockCase, dtype: mx.Dtype, length: int) -> None:
    blocks = Blocks.of(case)
    full, opened = mx.array(blocks.full_ids, mx.int32), mx.array(blocks.open_ids, mx.int32)
    for side in blocks.sides:
        of_full = unpack(as_mlx(side.full), full, length, dtype)
        of_open = unpack(as_mlx(side.opened), opened, length, dtype, bits=8)
        expected = side.full_row(blocks.full_ids, length), side.open_row(blocks.open_ids, length)
        for made, wanted in zip((of_full, of_open), expected, strict=True):
            assert error(made[0], as_computed(wanted, dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("case", BLOCK_CASES, ids=str)
def test_blocks_are_sealed_and_reopened_as_defined(case: BlockCase) -> None:
    blocks = Blocks.of(case)
    assert seal_error(blocks) == 0
    assert reopen_error(blocks) == 0


@pytest.mark.parametrize("case", LATENT_CASES, ids=ids(LATENT_CASES, LatentCase()))
def test_latent_decode_equals_its_definition(case: LatentCase) -> None:
    latents = Latents.of(case)
    expected = latents.expected()
    errors = [error(latents.decoded(threadgroups), expected) for threadgroups in (1, 64)]
    assert max(errors) <= TOLERANCE[case.dtype]
