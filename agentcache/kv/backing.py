"""The memory behind an arena's array. It grows without a copy if possible.

Most systems allocate a page at first touch, so reserving the largest size costs only addresses:

- CPU under Linux: an array of the largest size; pages behind the last slot stay untouched (`kv/reserved.py`).
- Unified memory: the device claims a whole array at first use. So arrays of growing size cover the front of one mapping
  (`kv/adopted.py`).
- Elsewhere, or if these fail: one array per size; growing copies (`Exact`).
"""

from __future__ import annotations

import sys
from typing import Protocol

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.adopted import Adopted, adopts
from agentcache.kv.block_layout import ALIGNMENT
from agentcache.kv.reserved import Reserved
from agentcache.kv.spec import TensorSpec
from agentcache.system.pages import addresses_are_free

ARRAY_DTYPES = {
    "F32": mx.float32,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F16": mx.float16,
    "BF16": mx.uint16,  # raw bits: the buffer protocol has no bfloat16
    "U8": mx.uint8,
}
_MOST_ELEMENTS = 2**31 - 1 - ALIGNMENT


class Backing(Protocol):
    """Memory for one array [num_blocks, *block], of at most `most` blocks."""

    most: int

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        """An array of `capacity` blocks, between steps. Copies are lazy.

        Args:
            array: current array, perhaps of another backing; unusable afterwards.
            used: blocks in `array`, kept if they fit; new blocks are zeros.
        """


class Exact:
    most = sys.maxsize

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        if capacity <= used:
            return mx.contiguous(array[:capacity])
        # Assigning into zeros touches each new page once; concatenating would need a second array.
        resized = mx.zeros((capacity, *array.shape[1:]), array.dtype)
        if used:
            resized[:used] = array[:used]
        return resized


def make_backing(spec: TensorSpec, most: int) -> tuple[Backing, mx.array]:
    """Return a backing for up to `most` blocks, and an array without usable blocks."""
    most = min(most, _MOST_ELEMENTS * spec.numpy_dtype.itemsize // max(1, spec.slot_bytes))
    if most and adopts():
        return Adopted(spec, most), _empty(spec)
    if most and mx.default_device() == mx.cpu and addresses_are_free():
        reserved = Reserved.make(spec, most)
        if reserved is not None:
            return reserved
    return Exact(), _empty(spec)


def _empty(spec: TensorSpec) -> mx.array:
    return mx.zeros((0, *spec.block_shape(BLOCK_SIZE)), ARRAY_DTYPES[spec.dtype])
