"""MLX arrays over memory that MLX neither zeroes nor copies."""

from __future__ import annotations

import ctypes
import io
import math
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.lib import format as npy

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import TensorSpec


def load_array(shape: tuple[int, ...], dtype: np.dtype[Any], content: Array | None = None) -> mx.array:
    """Return an evaluated array. `content`: uint8 [n]; None leaves memory untouched."""
    array = mx.load(_NpyFile(shape, dtype, content), format="npy", stream=mx.default_device())
    assert isinstance(array, mx.array)
    mx.eval(array)
    return array


def upload(data: Array) -> mx.array:
    """Return an evaluated copy of `data`, contiguous uint8 [n, bytes].

    Not by `mx.array`: the device would fetch its managed memory page by page.
    """
    return load_array(data.shape, data.dtype, data.reshape(-1).view(np.uint8))


def address_of(array: mx.array) -> int:
    """Address of a non-empty array in shared memory."""
    # NumPy would substitute its own memory for an empty array.
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(array).cast("B")))


def as_blocks(room: mx.array, spec: TensorSpec, count: int, begin: int = 0) -> mx.array:
    """An evaluated view [count, *block shape] in flat `room` from element `begin`."""
    shape = (count, *spec.block_shape(BLOCK_SIZE))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    blocks = mx.as_strided(room, shape, strides, begin)
    mx.eval(blocks)
    return blocks


class _NpyFile:
    closed = False

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], content: Array | None) -> None:
        header = io.BytesIO()
        npy.write_array_header_1_0(header, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
        self._header = np.frombuffer(header.getvalue(), np.uint8)
        self._content = content
        self._position = 0

    def seek(self, offset: int, whence: int) -> None:
        self._position = offset

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        """MLX never reads across the header's end."""
        begin = self._position
        self._position += len(buffer)
        if begin < self._header.size:
            buffer[:] = self._header[begin : self._position].data
        elif self._content is not None:
            begin -= self._header.size
            np.copyto(np.frombuffer(buffer, np.uint8), self._content[begin : begin + len(buffer)])
        return len(buffer)
