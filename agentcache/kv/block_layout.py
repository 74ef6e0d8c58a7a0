"""Where in a block's bytes each tensor lies, for the files and for the arenas that are filled from them."""

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

# Bytes: the tensors in a block's file begin on a multiple of these, and so do the memory they are read to and the one
# they are written from. Copies between places that are not a multiple of 32 bytes apart can take AMD's processors two
# to five times as long.
ALIGNMENT = 64


class BlockTensor(NamedTuple):
    """One tensor in the bytes of a group's blocks of `num_tokens` tokens: bytes `begin` to `end - 1`."""

    spec: TensorSpec
    num_tokens: int
    begin: int
    end: int

    def name(self, position: int) -> str:
        """In the file of the block of this number in its sequence."""
        return self.spec.name.replace(POSITION, str(position))

    def view(self, blocks: Array) -> Array:
        """The tensor in blocks [..., bytes] of uint8, as [..., *block shape]."""
        own = blocks[..., self.begin : self.end].view(self.spec.numpy_dtype)
        return own.reshape(*blocks.shape[:-1], *self.spec.block_shape(self.num_tokens))

    def runs(self, slot: int) -> Iterator[tuple[slice, slice]]:
        """Bytes of all slots of the tensor, and of the block: where a run lies in the one and in the other.

        What follows each other in a block is one run where the block is full, or its tokens are the first axis; else
        one for each entry of the axes before.
        """
        count = 1 if self.num_tokens == BLOCK_SIZE else self.spec.num_runs
        length, stride = (self.end - self.begin) // count, self.spec.slot_bytes // count
        there, own = slot * self.spec.slot_bytes, self.begin
        for _ in range(count):
            yield slice(there, there + length), slice(own, own + length)
            there, own = there + stride, own + length


Slots: TypeAlias = "tuple[memoryview, int]"  # where those of one tensor lie, and bytes of one


class RestBuffer:
    """Memory for the bytes of full blocks from their first float on.

    Args:
        sizes: bytes of each tensor.

    Attributes:
        data: uint8 [the sum of `sizes`].
        tensors: the same, cut into tensors.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.data = aligned(sum(sizes))
        ends = list(accumulate(sizes))
        self.tensors = [self.data.data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class Place:
    """Where a full block belongs in RAM, each of its tensors to a slot of its own.

    Args:
        memory: of its group.
        block_id: of all these slots.

    Attributes:
        integers: where the bytes in front of the block's first float belong. They may be anything as long as nobody
            reads the block.
    """

    def __init__(self, memory: GroupMemory, block_id: int) -> None:
        self.integers = [slots[block_id * size : (block_id + 1) * size] for slots, size in memory.integers]
        self._memory = memory
        self._block_id = block_id

    @property
    def rest_sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor from the first float on."""
        return self._memory.rest_sizes

    def put_rest(self, rest: RestBuffer) -> None:
        """Copy these tensors to where they belong.

        No other floats than finite ones may come there: a masked read would make NaN of them.
        """
        for (slots, size), tensor in zip(self._memory.rest, rest.tensors, strict=True):
            begin = self._block_id * size
            slots[begin : begin + size] = tensor

    def let_go(self) -> None:
        """Nobody may write there any more: what is computed next may move the array."""
        for run in self.integers:
            run.release()


class GroupMemory:
    """Where all slots of a group lie.

    Args:
        tensors: in the order of a block's bytes.
        num_integers: how many of them come before the first of floats.
    """

    def __init__(self, tensors: Sequence[Slots], num_integers: int) -> None:
        self.integers, self.rest = tensors[:num_integers], tensors[num_integers:]
        self.rest_sizes = tuple(size for _, size in self.rest)

    def place(self, block_id: int) -> Place:
        """Where a full block belongs."""
        return Place(self, block_id)

    def let_go(self) -> None:
        """No more places are asked for, and nobody writes to those that there were: the arena is its steps' alone."""
        for slots, _ in (*self.integers, *self.rest):
            slots.release()


def aligned(num_bytes: int) -> Array:
    """Memory for so many bytes, uint8 [num_bytes], which hold anything."""
    room = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + num_bytes]


@lru_cache(maxsize=256)
def block_tensors(group: GroupSpec, num_tokens: int) -> tuple[BlockTensor, ...]:
    """All tensors of a block of so many tokens of the group, in the order of its bytes."""
    tensors, begin = [], 0
    for spec in group.tensors:  # made anew for every length that a tail has: no more than sums
        end = begin + (spec.own_bytes if spec.token_axis is None else num_tokens * spec.own_bytes)
        tensors.append(BlockTensor(spec, num_tokens, begin, end))
        begin = end
    return tuple(tensors)


@lru_cache(maxsize=256)
def float_ranges(group: GroupSpec, num_tokens: int) -> tuple[tuple[int, int, np.dtype[Any]], ...]:
    """(first byte, byte behind, dtype) of all floats in a block of so many tokens; neighbours of one dtype are one."""
    ranges: list[tuple[int, int, np.dtype[Any]]] = []
    for tensor in block_tensors(group, num_tokens):
        begin, end, dtype = tensor.begin, tensor.end, tensor.spec.numpy_dtype
        if dtype.kind == "f":
            if ranges and ranges[-1][1:] == (begin, dtype):
                begin = ranges.pop()[0]
            ranges.append((begin, end, dtype))
    return tuple(ranges)


def first_float(group: GroupSpec, num_tokens: int) -> int:
    """Bytes of a block in front of its first float: of integers, which are sound whatever their bits are."""
    ranges = float_ranges(group, num_tokens)
    return ranges[0][0] if ranges else group.bytes_of(num_tokens)


def header_entries(group: GroupSpec, position: int, num_tokens: int) -> bytes:
    """The members of a safetensors header that describe the block's tensors, as JSON without the braces around it."""
    return str(position).encode().join(_around_position(group, num_tokens))


@lru_cache(maxsize=256)
def _around_position(group: GroupSpec, num_tokens: int) -> tuple[bytes, ...]:
    """What stands between the places of `POSITION`. Made once for all blocks: it was half of the time that it takes to
    read a small one."""
    entries = {
        tensor.spec.name: {
            "dtype": tensor.spec.dtype,
            "shape": tensor.spec.block_shape(num_tokens),
            "data_offsets": [tensor.begin, tensor.end],
        }
        for tensor in block_tensors(group, num_tokens)
    }
    return tuple(json.dumps(entries, separators=(",", ":"))[1:-1].encode().split(POSITION.encode()))
