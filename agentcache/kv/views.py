"""Addresses of arrays, and views of memory as blocks."""

from __future__ import annotations

import ctypes
import math

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.spec import TensorSpec


def address_of(array: mx.array) -> int:
    """Address of a non-empty array in memory that this process sees."""
    # NumPy would substitute its own memory for an empty array.
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(array).cast("B")))


def as_blocks(room: mx.array, spec: TensorSpec, count: int, begin: int = 0) -> mx.array:
    """An evaluated view [count, *block shape] in flat `room` from element `begin`."""
    shape = (count, *spec.block_shape(BLOCK_SIZE))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    blocks = mx.as_strided(room, shape, strides, begin)
    mx.eval(blocks)
    return blocks
