"""Arrays loaded from an in-memory .npy file, into memory that MLX neither zeroes nor copies."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.lib import format as npy

from agentcache.kv.block_layout import Array


def load(shape: tuple[int, ...], dtype: np.dtype[Any], content: Array | None = None) -> mx.array:
    """Return an evaluated array on the default device. `content`: uint8 [n]; None leaves the memory untouched."""
    array = mx.load(_NpyFile(shape, dtype, content), format="npy", stream=mx.default_device())
    assert isinstance(array, mx.array)
    mx.eval(array)
    return array


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
        """No read crosses the header's end."""
        begin = self._position
        self._position += len(buffer)
        if begin < self._header.size:
            buffer[:] = self._header[begin : self._position].data
        elif self._content is not None:
            begin -= self._header.size
            np.copyto(np.frombuffer(buffer, np.uint8), self._content[begin : begin + len(buffer)])
        return len(buffer)
