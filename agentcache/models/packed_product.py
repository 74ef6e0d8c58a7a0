"""Products with packed blocks, by MLX's quantised kernels if they are right.

Back ends lack some kernels, or have wrong ones (CUDA in MLX 0.32.4: keys of a single quantisation group). So each kind
of product is compared with its definition once per head shape and device; if it differs, blocks are unpacked. CUDA
never tries MLX's kernel for blocks that ours read: compiling it would block serving for over a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.packed import Packed, dequantise, quantise
from agentcache.kv.packing import Packing, Plain, Quantisation
from agentcache.metal_kernels.kernel_text import device
from agentcache.models.fused import read_by_kernels

log = logging.getLogger("agentcache.models")

Product = Callable[[mx.array, Packed, Packing, bool], mx.array]

_CHECKED_ROWS = (1, 2, 6, 16, 64)  # back ends choose kernels by the number of rows
_TOLERANCE = 1e-3  # of the largest result; some back ends multiply in tf32
_BLOCKS, _HEADS = 3, 2


def packed_product(x: mx.array, packed: Packed, quantisation: Packing, *, transpose: bool) -> mx.array:
    """Multiply float32 `x` with packed blocks [num_blocks, H, 256, D].

    Args:
        x: [num_blocks, H, n, D] with `transpose` (scores of queries), else [num_blocks, H, n, 256] (sums of values).

    Returns:
        [num_blocks, H, n, 256] with `transpose`, else [num_blocks, H, n, D].
    """
    if isinstance(quantisation, Plain) or (device() == "cuda" and read_by_kernels(quantisation)):
        return by_definition(x, packed, quantisation, transpose)
    dim = packed.data.shape[-1] * 32 // quantisation.bits
    right = kernel_is_right(dim, quantisation, transpose, mx.default_device().type)
    return (by_kernel if right else by_definition)(x, packed, quantisation, transpose)


def by_kernel(x: mx.array, packed: Packed, quantisation: Packing, transpose: bool) -> mx.array:
    """Product from packed data; MLX raises RuntimeError at evaluation if it has no kernel for the shape."""
    assert isinstance(quantisation, Quantisation)
    packing = {"group_size": quantisation.group_size, "bits": quantisation.bits}
    return mx.quantized_matmul(x, *packed, transpose=transpose, **packing)


def by_definition(x: mx.array, packed: Packed, quantisation: Packing, transpose: bool) -> mx.array:
    values = dequantise(packed, quantisation, mx.float32)
    return x @ (values.swapaxes(-1, -2) if transpose else values)


@cache
def kernel_is_right(dim: int, quantisation: Quantisation, transpose: bool, device: mx.DeviceType) -> bool:
    """Whether `by_kernel` agrees with `by_definition` for heads of `dim` values; warns if not."""
    if agrees(by_kernel, dim, quantisation, transpose):
        return True
    log.warning(
        "this device's packed product (%s, %d values a head, %s) is wrong or missing: blocks are unpacked (slower)",
        "keys" if transpose else "values",
        dim,
        quantisation,
    )
    return False


def agrees(product: Product, dim: int, quantisation: Quantisation, transpose: bool) -> bool:
    """Whether a product is right on random blocks, for few and many rows."""
    keys = mx.random.split(mx.random.key(dim), 1 + len(_CHECKED_ROWS))
    packed = quantise(mx.random.normal((_BLOCKS, _HEADS, BLOCK_SIZE, dim), key=keys[0]), quantisation)
    width = dim if transpose else BLOCK_SIZE
    inputs = [
        mx.random.normal((_BLOCKS, _HEADS, rows, width), key=key)
        for rows, key in zip(_CHECKED_ROWS, keys[1:], strict=True)
    ]
    try:
        return all(
            _close(product(x, packed, quantisation, transpose), packed, quantisation, transpose, x) for x in inputs
        )
    except RuntimeError as error:
        log.debug("no packed product: %s", error)
        return False


def _close(actual: mx.array, packed: Packed, quantisation: Quantisation, transpose: bool, x: mx.array) -> bool:
    expected = by_definition(x, packed, quantisation, transpose)
    largest = mx.abs(expected).max()
    return bool((mx.abs(actual - expected).max() <= _TOLERANCE * largest).item())
