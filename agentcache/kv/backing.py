"""The memory that an arena's array lies in, and how it grows: without a copy where the system lets it.

Most systems give memory page by page, as it is touched. So room for an arena's largest size costs nothing but
addresses, and an arena that grows stays where it is:

- On a CPU under Linux the array has its largest size from the start (`Reserved`); what is behind the slots that there
  are has never been touched.
- On unified memory a device takes hold of all of an array as soon as it computes with it. There the array is the front
  part of reserved memory of our own, and a larger part, which is another array, once it has grown (`Adopted`).
- Elsewhere, and where one of these does not work, each size is an array of its own (`Exact`), and is copied.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import resource
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Protocol

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv import npy_file
from agentcache.kv.block_layout import Array
from agentcache.kv.spec import TensorSpec

log = logging.getLogger(__name__)

ARRAY_DTYPES = {
    "F32": mx.float32,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F16": mx.float16,
    "BF16": mx.uint16,  # its bits: the buffer protocol, by which bytes come and go, knows no bfloat16
    "U8": mx.uint8,
}
_MOST_ELEMENTS = 2**31 - 1  # that an array can have as one axis
# See madvise(2) on Linux.
_MADV_DONTNEED, _MADV_NOHUGEPAGE, _MADV_POPULATE_WRITE = 4, 15, 23


class Backing(Protocol):
    """How one array [num_blocks, *block] is kept.

    Attributes:
        most: blocks it can have.
    """

    most: int

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        """An array for `capacity` blocks, `most` at most, evaluated; between steps.

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
            resized = mx.contiguous(array[:capacity])
        else:
            # Zeros first and then what is there: each page of the new array is touched for the first time once, and no
            # second array of zeros is made to be copied.
            resized = mx.zeros((capacity, *array.shape[1:]), array.dtype)
            if used:
                resized[:used] = array[:used]
        mx.eval(resized)
        return resized


def make_backing(spec: TensorSpec, most: int) -> tuple[Backing, mx.array]:
    """For arrays of up to `most` blocks, and an array to begin with, of no blocks that anybody may use."""
    most = min(most, _MOST_ELEMENTS * spec.numpy_dtype.itemsize // max(1, spec.slot_bytes))
    if most and adopts():
        return Adopted(spec, most), _empty(spec)
    if most and mx.default_device() == mx.cpu and _addresses_are_free():
        reserved = Reserved.make(spec, most)
        if reserved is not None:
            return reserved
    return Exact(), _empty(spec)


def _empty(spec: TensorSpec) -> mx.array:
    return mx.zeros((0, *spec.block_shape(BLOCK_SIZE)), ARRAY_DTYPES[spec.dtype])


def address_of(array: mx.array) -> int:
    """Where it lies, in memory that this process sees; not of an array without bytes."""
    # NumPy would make memory of its own for an array that has none.
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(array).cast("B")))


def _bytes_of(array: mx.array) -> Array:
    return np.frombuffer(memoryview(array).cast("B"), np.uint8)


# -- the largest array from the start, on Linux -----------------------------------------------------------------------


@cache
def _addresses_are_free() -> bool:
    """Whether this process may have as many as it likes: on Linux, if neither a limit nor strict accounting counts
    them, which would fail whoever asks for memory later."""
    if sys.platform != "linux":
        return False
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return False
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return False


class _Addresses:
    """Of what MLX counts as allocated, what is nothing but addresses; and MLX's limit, which is above ours by as much.

    MLX computes step by step, and nothing ahead, while it has more allocated than its limit.

    Attributes:
        apart: by how many bytes it is above ours.
    """

    def __init__(self) -> None:
        self._of: dict[int, int] = {}  # of every `Reserved` that there is
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
        if self._lock.acquire(blocking=False):  # whoever has it may be this thread, collecting garbage
            self._move_limit()
            self._lock.release()

    def set_limit(self, limit: int | None = None) -> int:
        """Have MLX keep to `limit` again, the last one by default; returns the last one."""
        with self._lock:
            return self._move_limit(limit)

    def _move_limit(self, limit: int | None = None) -> int:
        last: int = mx.get_memory_limit() - self.apart
        self.apart = self.num_bytes
        mx.set_memory_limit((last if limit is None else limit) + self.apart)
        return last


_addresses = _Addresses()


def allocated_bytes() -> int:
    """What MLX has allocated (`mx.get_active_memory`), without what is nothing but addresses."""
    allocated: int = mx.get_active_memory()
    return allocated - _addresses.num_bytes


def set_memory_limit(limit: int) -> int:
    """As `mx.set_memory_limit`, of `allocated_bytes`."""
    return _addresses.set_limit(limit)


def note_resized() -> None:
    """Arenas have other sizes now."""
    if _addresses.num_bytes != _addresses.apart:
        _addresses.set_limit()


class Reserved:
    """An array of the largest size, on Linux: slots that there are not are pages that the system has not given.

    New slots get theirs in the background, so that the machine knows soon that they are taken, and nobody waits.
    """

    def __init__(self, spec: TensorSpec, most: int, address: int) -> None:
        self.most = most
        self._slot_bytes, self._address = spec.slot_bytes, address
        self._note(0)

    @classmethod
    def make(cls, spec: TensorSpec, most: int) -> tuple[Reserved, mx.array] | None:
        """None where the system refuses so many addresses, or does not take pages back."""
        array = npy_file.load((most, *spec.block_shape(BLOCK_SIZE)), spec.numpy_dtype)
        address = address_of(array)
        # MLX does not say that it got none. What it got may have been used before.
        if address < mmap.PAGESIZE or not _take_pages(address, array.nbytes):
            return None
        # Where the system gives 2 MB at a time, an adapter's first block would take 2 MB of each of its tensors.
        first, last = _pages_within(address, address + array.nbytes)
        _madvise()(first, last - first, _MADV_NOHUGEPAGE)
        return cls(spec, most, address), array

    def _note(self, capacity: int) -> None:
        _addresses.note(self, (self.most - capacity) * self._slot_bytes)

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        """See `Backing`. The same array."""
        mx.eval(array)
        if address_of(array) != self._address:
            # Somebody held it during a write, and MLX copied all of it.
            log.warning("an arena of %d bytes was copied", array.nbytes)
            self._address = address_of(array)
        size = self._slot_bytes
        if capacity < used:
            wait_for_pages()  # or slots that are no more would get some
            _take_pages(self._address + capacity * size, (used - capacity) * size)
        else:
            _populator().submit(_populate, self._address + used * size, (capacity - used) * size)
        self._note(capacity)
        return array


@cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def _take_pages(begin: int, num_bytes: int) -> bool:
    """Zeros from `begin` on, in pages that go back to the system; False where it does not take them."""
    end = begin + num_bytes
    first, last = _pages_within(begin, end)
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(last, 0, end - last)
    return first == last or _madvise()(first, last - first, _MADV_DONTNEED) == 0


def _pages_within(begin: int, end: int) -> tuple[int, int]:
    """Where the pages begin and end that lie there as a whole; both `end` where none does."""
    first, last = _to_page_end(begin), end // mmap.PAGESIZE * mmap.PAGESIZE
    return (first, last) if first < last else (end, end)


def _populate(begin: int, num_bytes: int) -> None:
    """Have all pages there, whatever they hold. Linux before 5.14 cannot: each comes when it is written."""
    first, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + num_bytes
    _madvise()(first, end - first, _MADV_POPULATE_WRITE)


@cache
def _populator() -> ThreadPoolExecutor:
    """Does one thing after the other."""
    return ThreadPoolExecutor(1, "agentcache-pages")


def wait_for_pages() -> None:
    """Return when all slots that there are have memory."""
    if _populator.cache_info().currsize:
        _populator().submit(int).result()


# -- the front part of memory of our own, on a Mac --------------------------------------------------------------------


class Adopted:
    """The front part of reserved memory, which MLX takes as an array where it lies: on a Mac.

    Args:
        adopt: `mx.asarray(..., copy=False)`.
    """

    def __init__(self, spec: TensorSpec, most: int, adopt: Callable[[Array], mx.array] | None = None) -> None:
        self.most = most
        self._spec = spec
        self._adopt = adopt or _adopt
        self._pages = _pages(most * spec.slot_bytes)

    def resized(self, array: mx.array, used: int, capacity: int) -> mx.array:
        """See `Backing`. A copy where it shrinks, so that what it had goes back to the system."""
        mx.eval(array)
        kept = min(used, capacity) * self._spec.slot_bytes
        pages = self._pages if capacity >= used else _pages(self.most * self._spec.slot_bytes)
        if kept and address_of(array) != pages.ctypes.data:
            pages[:kept] = _bytes_of(array)[:kept]
        self._pages = pages
        if not capacity:
            return _empty(self._spec)
        return self._front(capacity)

    def _front(self, capacity: int) -> mx.array:
        """The first so many blocks; as Metal wants it, to the end of a page."""
        num_bytes = _to_page_end(capacity * self._spec.slot_bytes)
        flat = self._adopt(self._pages[:num_bytes].view(self._spec.numpy_dtype))
        shape = (capacity, *self._spec.block_shape(BLOCK_SIZE))
        strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
        front = mx.as_strided(flat, shape, strides, 0)
        mx.eval(front)
        return front


def _to_page_end(num_bytes: int) -> int:
    """The least number of whole pages' bytes that is not less."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _pages(num_bytes: int) -> Array:
    """Zeros, uint8 [whole pages], of which the system gives what is touched."""
    return np.frombuffer(
        mmap.mmap(-1, max(1, _to_page_end(num_bytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )


def _adopt(data: Array) -> mx.array:
    return mx.asarray(data, copy=False)


@cache
def adopts() -> bool:
    """Whether MLX takes our memory as an array, writes where it lies, and takes more of it later: tried out, once."""
    if not mx.metal.is_available():
        return False
    try:
        spec = TensorSpec("tried", "U32", (mmap.PAGESIZE // 8,), token_axis=None)
        adopted = Adopted(spec, 8)
        array = adopted.resized(_empty(spec), 0, 3)
        address = address_of(array)
        for capacity in (3, 8):
            array = adopted.resized(array, 3, capacity)
            array[2] = mx.array(capacity, mx.uint32)
            mx.eval(array)
            content = np.array(array)
            if address_of(array) != address or (content[2] != capacity).any() or content[3:].any():
                return False
    except Exception as error:  # whatever it is, there is another way
        log.info("arenas are copied when they grow: %s", error)
        return False
    return True
