"""Memory behind an arena's array, which grows without copies if possible: untouched pages cost only addresses."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Protocol

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.block_layout import ALIGNMENT, Array
from agentcache.kv.raw_arrays import address_of, as_blocks, load_array
from agentcache.kv.spec import TensorSpec
from agentcache.system.pages import addresses_are_free, keep_pages_small, populate_pages, take_pages, to_page_end

ARRAY_DTYPES = {
    "F32": mx.float32,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F16": mx.float16,
    "BF16": mx.uint16,  # raw bits: the buffer protocol has no bfloat16
    "U8": mx.uint8,
}
_MOST_ELEMENTS = 2**31 - 1 - ALIGNMENT

log = logging.getLogger(__name__)


class Backing(Protocol):
    """Memory for one array [num_blocks, *block], of at most `most` blocks."""

    most: int

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        """Return `capacity` blocks: the first `used` of `array`, then zeros. Lazy. Between steps.

        `array`, perhaps of another backing, becomes unusable.
        """


def make_backing(spec: TensorSpec, most: int) -> tuple[Backing, mx.array]:
    """Return a backing, and an array without usable blocks."""
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


class Exact:
    """One array per size; growing copies."""

    most = sys.maxsize

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        if capacity <= used:
            return mx.contiguous(array[:capacity])
        # Concatenating would need a second array.
        resized = mx.zeros((capacity, *array.shape[1:]), array.dtype)
        if used:
            resized[:used] = array[:used]
        return resized


class Adopted:
    """Arrays of growing size over one mapping: on macOS, the device claims a whole array at first use."""

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
    """Whether MLX can write and later extend arrays over our memory."""
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


class Reserved:
    """One array of maximum size, on Linux CPUs. A thread allocates new slots' pages: steps do not wait."""

    def __init__(self, spec: TensorSpec, most: int, address: int) -> None:
        self.most = most
        self._slot_bytes, self._address = spec.slot_bytes, address
        self._note(0)

    @classmethod
    def make(cls, spec: TensorSpec, most: int) -> tuple[Reserved, mx.array] | None:
        """Return the backing and its array; None if the system refuses addresses, or keeps freed pages."""
        itemsize = spec.numpy_dtype.itemsize
        room = load_array(((most * spec.slot_bytes + ALIGNMENT) // itemsize,), spec.numpy_dtype)
        begin = address_of(room)
        # MLX does not report failed allocations, and may reuse memory with old data.
        if begin < mmap.PAGESIZE or not take_pages(begin, room.nbytes):
            return None
        array = as_blocks(room, spec, most, -begin % ALIGNMENT // itemsize)
        address = address_of(array)
        # With huge pages, a first block would take 2 MB per tensor.
        keep_pages_small(address, address + array.nbytes)
        return cls(spec, most, address), array

    def _note(self, capacity: int) -> None:
        _addresses.note(self, (self.most - capacity) * self._slot_bytes)

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        mx.eval(array)
        if address_of(array) != self._address:
            # A reference was held during a write.
            log.warning("an arena of %d bytes was copied", array.nbytes)
            self._address = address_of(array)
        size = self._slot_bytes
        if capacity < used:
            wait_for_pages()  # or removed slots would get pages
            begin, freed = self._address + capacity * size, (used - capacity) * size
            if not take_pages(begin, freed):
                ctypes.memset(begin, 0, freed)
        else:
            _populator().submit(populate_pages, self._address + used * size, (capacity - used) * size)
        self._note(capacity)
        return array


@cache
def _populator() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "agentcache-pages")


def wait_for_pages() -> None:
    if _populator.cache_info().currsize:
        _populator().submit(int).result()


class _Addresses:
    """Counts addresses without memory, and raises MLX's limit by as much.

    MLX counts them as allocated, and above its limit stops computing ahead.
    """

    def __init__(self) -> None:
        self._of: dict[int, int] = {}  # by id of each live `Reserved`
        self.apart = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        return sum(list(self._of.values()))

    def note(self, owner: Reserved, num_bytes: int) -> None:
        if id(owner) not in self._of:
            weakref.finalize(owner, self._forget, id(owner))
        self._of[id(owner)] = num_bytes

    def _forget(self, key: int) -> None:
        del self._of[key]
        if self._lock.acquire(blocking=False):  # this thread may hold it, in garbage collection
            self._move_limit()
            self._lock.release()

    def set_limit(self, limit: int | None = None) -> int:
        """Set the limit; None keeps it. Return the last one."""
        with self._lock:
            return self._move_limit(limit)

    def _move_limit(self, limit: int | None = None) -> int:
        last: int = mx.get_memory_limit() - self.apart
        self.apart = self.num_bytes
        mx.set_memory_limit((last if limit is None else limit) + self.apart)
        return last


_addresses = _Addresses()


def allocated_bytes() -> int:
    allocated: int = mx.get_active_memory()
    return allocated - _addresses.num_bytes


def set_memory_limit(limit: int) -> int:
    """`mx.set_memory_limit`, in terms of `allocated_bytes`."""
    return _addresses.set_limit(limit)


def note_resized() -> None:
    """Adjust MLX's limit; call after a resize."""
    if _addresses.num_bytes != _addresses.apart:
        _addresses.set_limit()
