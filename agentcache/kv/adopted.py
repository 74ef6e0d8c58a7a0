"""Arrays over the front of reserved memory, used by MLX without a copy. For macOS."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np

from agentcache.kv.block_layout import Array
from agentcache.kv.spec import TensorSpec
from agentcache.kv.views import address_of, as_blocks
from agentcache.system.pages import to_page_end

log = logging.getLogger(__name__)


class Adopted:
    """A backing that grows in place, over the front of one memory mapping."""

    def __init__(self, spec: TensorSpec, most: int, adopt: Callable[[Array], mx.array] | None = None) -> None:
        self.most = most
        self._spec = spec
        self._adopt = adopt or _adopt
        self._pages = _pages(most * spec.slot_bytes)

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        mx.eval(array)
        kept = min(used, capacity) * self._spec.slot_bytes
        pages = self._pages if capacity >= used else _pages(self.most * self._spec.slot_bytes)
        if kept and address_of(array) != pages.ctypes.data:
            pages[:kept] = np.frombuffer(memoryview(array).cast("B"), np.uint8)[:kept]
        self._pages = pages
        if not capacity:
            return mx.zeros((0, *array.shape[1:]), array.dtype)
        return self._front(capacity)

    def _front(self, capacity: int) -> mx.array:
        num_bytes = to_page_end(capacity * self._spec.slot_bytes)
        return as_blocks(self._adopt(self._pages[:num_bytes].view(self._spec.numpy_dtype)), self._spec, capacity)


def _pages(num_bytes: int) -> Array:
    return np.frombuffer(
        mmap.mmap(-1, max(1, to_page_end(num_bytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )


def _adopt(data: Array) -> mx.array:
    return mx.asarray(data, copy=False)


@cache
def adopts() -> bool:
    """Whether MLX can use, write and later extend an array over our memory. Tested once."""
    if not mx.metal.is_available():
        return False
    try:
        spec = TensorSpec("tried", "U32", (mmap.PAGESIZE // 8,), token_axis=None)
        adopted = Adopted(spec, 8)
        array = adopted.resized(mx.zeros((0, mmap.PAGESIZE // 8), mx.uint32), 0, 3)
        address = address_of(array)
        for capacity in (3, 8):
            array = adopted.resized(array, 3, capacity)
            array[2] = mx.array(capacity, mx.uint32)
            mx.eval(array)
            content = np.array(array)
            if address_of(array) != address or (content[2] != capacity).any() or content[3:].any():
                return False
    except Exception as error:  # use `Exact`
        log.info("arenas are copied when they grow: %s", error)
        return False
    return True
