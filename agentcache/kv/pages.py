"""Where arrays lie, and the pages that the system gives memory in."""

from __future__ import annotations

import ctypes
import math
import mmap

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.spec import TensorSpec


def address_of(array: mx.array) -> int:
    """Where it lies, in memory that this process sees; not of an array without bytes."""
    # NumPy would make memory of its own for an array that has none.
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(array).cast("B")))


def as_blocks(room: mx.array, spec: TensorSpec, count: int, begin: int = 0) -> mx.array:
    """So many blocks of a tensor, [count, *its shape in a block], where they lie in an array of one axis; evaluated.

    Args:
        room: of the tensor's dtype, from whose element `begin` on there is room for them.
    """
    shape = (count, *spec.block_shape(BLOCK_SIZE))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    blocks = mx.as_strided(room, shape, strides, begin)
    mx.eval(blocks)
    return blocks


def to_page_end(num_bytes: int) -> int:
    """The least number of whole pages' bytes that is not less."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
