"""Arrays of maximum size whose memory is allocated with their slots. For CPUs under Linux.

MLX counts untouched pages. This module corrects its count and limit.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock

import mlx.core as mx

from agentcache.kv import npy_file
from agentcache.kv.block_layout import ALIGNMENT
from agentcache.kv.spec import TensorSpec
from agentcache.kv.views import address_of, as_blocks
from agentcache.system.pages import keep_pages_small, populate_pages, take_pages

log = logging.getLogger(__name__)


class _Addresses:
    """Counts reserved addresses without memory, and raises MLX's limit by as much.

    MLX stops computing ahead above its limit.
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
        if self._lock.acquire(blocking=False):  # this thread may hold it, during garbage collection
            self._move_limit()
            self._lock.release()

    def set_limit(self, limit: int | None = None) -> int:
        """Set the limit, by default again to the last one. Return the last one."""
        with self._lock:
            return self._move_limit(limit)

    def _move_limit(self, limit: int | None = None) -> int:
        last: int = mx.get_memory_limit() - self.apart
        self.apart = self.num_bytes
        mx.set_memory_limit((last if limit is None else limit) + self.apart)
        return last


_addresses = _Addresses()


def allocated_bytes() -> int:
    """Bytes that MLX has allocated, without untouched addresses."""
    allocated: int = mx.get_active_memory()
    return allocated - _addresses.num_bytes


def set_memory_limit(limit: int) -> int:
    """`mx.set_memory_limit`, in terms of `allocated_bytes`."""
    return _addresses.set_limit(limit)


def note_resized() -> None:
    """Adjust MLX's limit after a resize of arenas."""
    if _addresses.num_bytes != _addresses.apart:
        _addresses.set_limit()


class Reserved:
    """A backing of maximum size, whose unused slots have no memory.

    A background thread allocates new slots' pages: the system counts them early, and steps do not wait.
    """

    def __init__(self, spec: TensorSpec, most: int, address: int) -> None:
        self.most = most
        self._slot_bytes, self._address = spec.slot_bytes, address
        self._note(0)

    @classmethod
    def make(cls, spec: TensorSpec, most: int) -> tuple[Reserved, mx.array] | None:
        """Return None if the system refuses the addresses or does not take pages back."""
        itemsize = spec.numpy_dtype.itemsize
        room = npy_file.load(((most * spec.slot_bytes + ALIGNMENT) // itemsize,), spec.numpy_dtype)
        begin = address_of(room)
        # MLX does not report failed allocations, and may reuse memory with old data.
        if begin < mmap.PAGESIZE or not take_pages(begin, room.nbytes):
            return None
        array = as_blocks(room, spec, most, -begin % ALIGNMENT // itemsize)
        address = address_of(array)
        # With huge pages, an adapter's first block would take 2 MB per tensor.
        keep_pages_small(address, address + array.nbytes)
        return cls(spec, most, address), array

    def _note(self, capacity: int) -> None:
        _addresses.note(self, (self.most - capacity) * self._slot_bytes)

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        mx.eval(array)
        if address_of(array) != self._address:
            # A reference held during a write made MLX copy the array.
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
    """Wait until all slots have memory."""
    if _populator.cache_info().currsize:
        _populator().submit(int).result()
