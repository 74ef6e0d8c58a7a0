"""The memory that an arena's array lies in, and how it grows: without a copy where the system lets it.

Most systems give memory page by page, as it is touched. So room for an arena's largest size costs nothing but
addresses, and an arena that grows stays where it is:

- On a CPU under Linux the array has its largest size from the start, and what is behind the slots that there are has
  never been touched (`kv/reserved.py`).
- On unified memory a device takes hold of all of an array as soon as it computes with it. There the array is the front
  part of reserved memory of our own, and a larger part, which is another array, once it has grown (`kv/adopted.py`).
- Elsewhere, and where one of these does not work, each size is an array of its own (`Exact`), and is copied.
"""

from __future__ import annotations

import sys
from typing import Protocol

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.adopted import Adopted, adopts
from agentcache.kv.block_layout import ALIGNMENT
from agentcache.kv.reserved import Reserved, addresses_are_free
from agentcache.kv.spec import TensorSpec

ARRAY_DTYPES = {
    "F32": mx.float32,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F16": mx.float16,
    "BF16": mx.uint16,  # its bits: the buffer protocol, by which bytes come and go, knows no bfloat16
    "U8": mx.uint8,
}
_MOST_ELEMENTS = 2**31 - 1 - ALIGNMENT  # that an array can have as one axis, and room to begin where it is to


class Backing(Protocol):
    """How one array [num_blocks, *block] is kept.

    Attributes:
        most: blocks it can have.
    """

    most: int

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        """An array for `capacity` blocks, `most` at most; between steps. Lazy where it is a copy.

        Args:
            array: the one until now, which must not be used any more. It may have been another backing's.
            used: how many blocks it had. As many of them as there is room for are kept, and what is new holds zeros.
        """


class Exact:
    """Each size is an array of its own."""

    most = sys.maxsize

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        """See `Backing`."""
        if capacity <= used:
            return mx.contiguous(array[:capacity])
        # Zeros first and then what is there: each page of the new array is touched for the first time once, and no
        # second array of zeros is made to be copied.
        resized = mx.zeros((capacity, *array.shape[1:]), array.dtype)
        if used:
            resized[:used] = array[:used]
        return resized


def make_backing(spec: TensorSpec, most: int) -> tuple[Backing, mx.array]:
    """For arrays of up to `most` blocks, and an array to begin with, of no blocks that anybody may use."""
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
