"""Where in a block's bytes each tensor lies, for the files and for the arenas that are filled from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.spec import POSITION, GroupSpec, TensorSpec

Array = NDArray[Any]


@dataclass(frozen=True)
class BlockTensor:
    """One tensor of a group's blocks, and the bytes before it: so many for each token of the block, so many once."""

    spec: TensorSpec
    token_bytes_before: int
    once_bytes_before: int

    def name(self, position: int) -> str:
        """In the file of the block of this number in its sequence."""
        return self.spec.name.replace(POSITION, str(position))

    def begin(self, num_tokens: int) -> int:
        """Its first byte in a block of so many tokens."""
        return num_tokens * self.token_bytes_before + self.once_bytes_before

    def end(self, num_tokens: int) -> int:
        """The byte behind its last one."""
        times = 1 if self.spec.token_axis is None else num_tokens
        return self.begin(num_tokens) + times * self.spec.own_bytes

    def view(self, blocks: Array, num_tokens: int) -> Array:
        """The tensor in blocks [..., bytes] of uint8, all of `num_tokens` tokens, as [..., *block shape]."""
        own = blocks[..., self.begin(num_tokens) : self.end(num_tokens)].view(self.spec.numpy_dtype)
        return own.reshape(*blocks.shape[:-1], *self.spec.block_shape(num_tokens))


@lru_cache(maxsize=256)
def block_tensors(group: GroupSpec) -> tuple[BlockTensor, ...]:
    """All tensors of a block of the group, in the order of its bytes."""
    tensors: list[BlockTensor] = []
    of_token = once = 0
    for tensor in group.tensors:
        tensors.append(BlockTensor(tensor, of_token, once))
        if tensor.token_axis is None:
            once += tensor.own_bytes
        else:
            of_token += tensor.own_bytes
    return tuple(tensors)


@dataclass(frozen=True)
class SlotRuns:
    """How a tensor's bytes in a block, which follow each other, lie in its slot: `count` runs of `length` bytes.

    Args:
        name: the tensor's.
        begin: its first byte in the block.
        stride: from the beginning of a run to that of the next, in the slot.
        slot_bytes: of the tensor's slot, with room for 256 tokens.
    """

    name: str
    begin: int
    count: int
    length: int
    stride: int
    slot_bytes: int

    def pairs(self, block_id: int) -> Iterator[tuple[slice, slice]]:
        """Bytes of all slots of the tensor, and of the block: where a run lies in the one and in the other."""
        slot, begin, length = block_id * self.slot_bytes, self.begin, self.length
        for _ in range(self.count):
            yield slice(slot, slot + length), slice(begin, begin + length)
            slot, begin = slot + self.stride, begin + length


@lru_cache(maxsize=256)
def slot_runs(group: GroupSpec, num_tokens: int) -> tuple[SlotRuns, ...]:
    """All tensors of a block of so many tokens, in the order of its bytes.

    A tensor is one run where the block is full, or its tokens are the first axis.
    """
    return tuple(_runs_of(tensor, num_tokens) for tensor in block_tensors(group))


def _runs_of(tensor: BlockTensor, num_tokens: int) -> SlotRuns:
    spec, begin = tensor.spec, tensor.begin(num_tokens)
    slot_bytes = math.prod(spec.block_shape(BLOCK_SIZE)) * spec.numpy_dtype.itemsize
    if spec.token_axis is None or num_tokens == BLOCK_SIZE:
        return SlotRuns(spec.name, begin, 1, slot_bytes, slot_bytes, slot_bytes)
    count = math.prod(spec.shape[: spec.token_axis])
    return SlotRuns(spec.name, begin, count, num_tokens * spec.own_bytes // count, slot_bytes // count, slot_bytes)


@lru_cache(maxsize=256)
def float_ranges(group: GroupSpec, num_tokens: int) -> tuple[tuple[int, int, np.dtype[Any]], ...]:
    """(first byte, byte behind, dtype) of all floats in a block of so many tokens; neighbours of one dtype are one."""
    ranges: list[tuple[int, int, np.dtype[Any]]] = []
    for tensor in block_tensors(group):
        begin, end, dtype = tensor.begin(num_tokens), tensor.end(num_tokens), tensor.spec.numpy_dtype
        if dtype.kind == "f":
            if ranges and ranges[-1][1:] == (begin, dtype):
                begin = ranges.pop()[0]
            ranges.append((begin, end, dtype))
    return tuple(ranges)


def header_entries(group: GroupSpec, position: int, num_tokens: int) -> str:
    """The members of a safetensors header that describe the block's tensors, as JSON without the braces around it."""
    return _entries_anywhere(group, num_tokens).replace(POSITION, str(position))


@lru_cache(maxsize=256)
def _entries_anywhere(group: GroupSpec, num_tokens: int) -> str:
    """Written once for all blocks: it was half of the time that it takes to read a small one."""
    entries = {
        tensor.spec.name: {
            "dtype": tensor.spec.dtype,
            "shape": tensor.spec.block_shape(num_tokens),
            "data_offsets": [tensor.begin(num_tokens), tensor.end(num_tokens)],
        }
        for tensor in block_tensors(group)
    }
    return json.dumps(entries, separators=(",", ":"))[1:-1]
