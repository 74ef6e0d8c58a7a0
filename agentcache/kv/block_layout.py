"""Byte layout of a block's tensors, in files and arenas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.spec import POSITION, GroupSpec, TensorSpec

Array = NDArray[Any]

# Bytes, in files and buffers. AMD processors copy slowly between addresses that differ mod 32.
ALIGNMENT = 64


class BlockTensor(NamedTuple):
    """One tensor of a block: bytes `begin … end - 1`."""

    spec: TensorSpec
    num_tokens: int
    begin: int
    end: int

    def name(self, position: int) -> str:
        return self.spec.name.replace(POSITION, str(position))

    def view(self, blocks: Array) -> Array:
        """View [..., *block shape] of blocks, uint8 [..., bytes]."""
        own = blocks[..., self.begin : self.end].view(self.spec.numpy_dtype)
        return own.reshape(*blocks.shape[:-1], *self.spec.block_shape(self.num_tokens))

    def runs(self, slot: int) -> Iterator[tuple[slice, slice]]:
        """Contiguous byte ranges: in the tensor's arena, in the block."""
        count = 1 if self.num_tokens == BLOCK_SIZE else self.spec.num_runs
        length, stride = (self.end - self.begin) // count, self.spec.slot_bytes // count
        there, own = slot * self.spec.slot_bytes, self.begin
        for _ in range(count):
            yield slice(there, there + length), slice(own, own + length)
            there, own = there + stride, own + length


Slots: TypeAlias = "tuple[memoryview, int]"  # memory, bytes per slot


class RestBuffer:
    """Buffer for a full block from the first float on."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.data = aligned(sum(sizes))
        ends = list(accumulate(sizes))
        self.tensors = [self.data.data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class Place:
    """One slot's memory. `integers` take the bytes before the first float."""

    def __init__(self, memory: GroupMemory, block_id: int) -> None:
        self.integers = [slots[block_id * size : (block_id + 1) * size] for slots, size in memory.integers]
        self._memory = memory
        self._block_id = block_id

    @property
    def rest_sizes(self) -> tuple[int, ...]:
        return self._memory.rest_sizes

    def put_rest(self, rest: RestBuffer) -> None:
        """Copy the float tensors. Values must be finite: masked reads turn infinity into NaN."""
        for (slots, size), tensor in zip(self._memory.rest, rest.tensors, strict=True):
            begin = self._block_id * size
            slots[begin : begin + size] = tensor

    def let_go(self) -> None:
        """Release the views, before any computation."""
        for run in self.integers:
            run.release()


class GroupMemory:
    """Memory of a group's slots, in block byte order."""

    def __init__(self, tensors: Sequence[Slots], num_integers: int) -> None:
        self.integers, self.rest = tensors[:num_integers], tensors[num_integers:]
        self.rest_sizes = tuple(size for _, size in self.rest)

    def place(self, block_id: int) -> Place:
        return Place(self, block_id)

    def let_go(self) -> None:
        """Release the memory, when no `Place` is in use."""
        for slots, _ in (*self.integers, *self.rest):
            slots.release()


def aligned(num_bytes: int) -> Array:
    """Uninitialised uint8 [num_bytes], aligned."""
    room = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + num_bytes]


@lru_cache(maxsize=256)
def block_tensors(group: GroupSpec, num_tokens: int) -> tuple[BlockTensor, ...]:
    tensors, begin = [], 0
    for spec in group.tensors:  # must be cheap: runs for every tail length
        end = begin + (spec.own_bytes if spec.token_axis is None else num_tokens * spec.own_bytes)
        tensors.append(BlockTensor(spec, num_tokens, begin, end))
        begin = end
    return tuple(tensors)


@lru_cache(maxsize=256)
def float_ranges(group: GroupSpec, num_tokens: int) -> tuple[tuple[int, int, np.dtype[Any]], ...]:
    """(begin, end, dtype) of a block's floats, merged if adjacent."""
    ranges: list[tuple[int, int, np.dtype[Any]]] = []
    for tensor in block_tensors(group, num_tokens):
        begin, end, dtype = tensor.begin, tensor.end, tensor.spec.numpy_dtype
        if dtype.kind == "f":
            if ranges and ranges[-1][1:] == (begin, dtype):
                begin = ranges.pop()[0]
            ranges.append((begin, end, dtype))
    return tuple(ranges)


def first_float(group: GroupSpec, num_tokens: int) -> int:
    """Bytes before a block's first float: integers, whose bits are always valid."""
    ranges = float_ranges(group, num_tokens)
    return ranges[0][0] if ranges else group.bytes_of(num_tokens)


def header_entries(group: GroupSpec, position: int, num_tokens: int) -> bytes:
    """Members of a safetensors header: JSON without outer braces."""
    return str(position).encode().join(_around_position(group, num_tokens))


@lru_cache(maxsize=256)  # else it dominates reads of small blocks
def _around_position(group: GroupSpec, num_tokens: int) -> tuple[bytes, ...]:
    entries = {
        tensor.spec.name: {
            "dtype": tensor.spec.dtype,
            "shape": tensor.spec.block_shape(num_tokens),
            "data_offsets": [tensor.begin, tensor.end],
        }
        for tensor in block_tensors(group, num_tokens)
    }
    return tuple(json.dumps(entries, separators=(",", ":"))[1:-1].encode().split(POSITION.encode()))
