"""All blocks of a cache group, and how their bytes come and go.

Where the device computes in the memory that this process sees (a CPU, unified memory), blocks are read from files to
where an array lies, or copied to there, while no step is under way; elsewhere they are uploaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.arena import LayerArena
from agentcache.kv.backing import ARRAY_DTYPES
from agentcache.kv.block_layout import Array, GroupMemory, aligned, block_tensors, first_float
from agentcache.kv.spec import CacheSpec, GroupSpec
from agentcache.kv.tensor_arena import TensorArena, copy_block, resize, shares_memory
from agentcache.kv.upload import upload


class GroupArena:
    """All tensors of one cache group.

    Args:
        room: bytes that the group may come to take (`TensorArena`).

    Attributes:
        layers: attention's view of them; empty in a group of other tensors.
    """

    def __init__(self, spec: GroupSpec, room: int = 0) -> None:
        self.spec = spec
        most = room // spec.bytes_per_block
        self._tensors = {tensor.name: TensorArena(tensor, most) for tensor in spec.tensors}
        packing = spec.packing
        self.layers = [] if packing is None else [LayerArena(layer, packing, self._tensors) for layer in spec.layers]

    @property
    def capacity(self) -> int:
        return next(iter(self._tensors.values())).capacity

    def grow(self, capacity: int) -> None:
        """Follow the block pool's capacity upwards; the new slots hold zeros."""
        resize([tensor for tensor in self._tensors.values() if tensor.capacity < capacity], capacity)

    def shrink(self, capacity: int) -> None:
        """Follow the block pool's capacity downwards."""
        resize([tensor for tensor in self._tensors.values() if tensor.capacity > capacity], capacity)

    def copy(self, source: int, target: int) -> None:
        """See `copy_block`."""
        copy_block(self._tensors.values(), source, target)

    def snapshot(self, block_id: int, num_tokens: int) -> Array:
        """Bytes of a block's first `num_tokens` tokens, uint8 [n] as `block_layout` has them, copied once.

        While no step is under way.
        """
        if not shares_memory():
            return self._download(block_id, num_tokens)
        block = aligned(self.spec.bytes_of(num_tokens))
        self._copy_out(block_id, num_tokens, block.data)
        return block

    def _copy_out(self, block_id: int, num_tokens: int, target: memoryview) -> None:
        for tensor in block_tensors(self.spec, num_tokens):
            memory = self._tensors[tensor.spec.name].memory()
            for slot, own in tensor.runs(block_id):
                target[own] = memory[slot]

    def _download(self, block_id: int, num_tokens: int) -> Array:
        """Put together on the device: one transfer, not one a tensor."""
        tensors = (self._tensors[tensor.spec.name] for tensor in block_tensors(self.spec, num_tokens))
        parts = [tensor.tokens(block_id, num_tokens).reshape(-1).view(mx.uint8) for tensor in tensors]
        return np.array(mx.concatenate(parts))

    def memory(self) -> GroupMemory | None:
        """Where the slots lie, to read files straight to there. While no step is under way.

        None where the device's memory is not ours, and where blocks are floats for the most part. Let go of it before
        anything else is done with the arena.
        """
        first = first_float(self.spec, BLOCK_SIZE)
        if not shares_memory() or 2 * first < self.spec.bytes_per_block:
            return None
        num_integers = sum(tensor.end <= first for tensor in block_tensors(self.spec, BLOCK_SIZE))
        return GroupMemory([(each.memory(), each.spec.slot_bytes) for each in self._tensors.values()], num_integers)

    def put(self, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks into slots `block_ids`. While no step is under way.

        Args:
            blocks: bytes of each block's tensors, uint8 [n], as `block_layout` has them; at most 256 tokens. They may
                change as soon as this returns.
        """
        if shares_memory():
            self._put_in_place(block_ids, blocks)
            return
        sizes = [block.nbytes for block in blocks]
        for size in set(sizes):
            indices = [index for index, each in enumerate(sizes) if each == size]
            self._upload([block_ids[index] for index in indices], [blocks[index] for index in indices])

    def _put_in_place(self, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Copy every tensor's bytes to where they belong; what blocks lack of 256 tokens becomes zeros."""
        layouts = [block_tensors(self.spec, self.spec.tokens_in(block.nbytes)) for block in blocks]
        sources = [block.data for block in blocks]
        for index, arena in enumerate(self._tensors.values()):  # in the order of a block's bytes
            memory, slot_bytes = arena.memory(), arena.spec.slot_bytes
            for block_id, layout, source in zip(block_ids, layouts, sources, strict=True):
                tensor = layout[index]
                if tensor.end - tensor.begin < slot_bytes:
                    memory[block_id * slot_bytes : (block_id + 1) * slot_bytes] = bytes(slot_bytes)
                for slot, own in tensor.runs(block_id):
                    memory[slot] = source[own]

    def _upload(self, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks of the same length: one transfer to the device, which then puts their parts in place."""
        num_tokens, count = self.spec.tokens_in(blocks[0].nbytes), len(blocks)
        there = upload(_joined(blocks))
        for tensor in block_tensors(self.spec, num_tokens):
            own = mx.contiguous(there[:, tensor.begin : tensor.end])
            shape = (count, *tensor.spec.block_shape(num_tokens))
            self._tensors[tensor.spec.name].upload(block_ids, own.view(ARRAY_DTYPES[tensor.spec.dtype]).reshape(shape))

    @property
    def tensors(self) -> Iterable[TensorArena]:
        """In the order of the spec."""
        return self._tensors.values()

    def take_written(self) -> list[mx.array]:
        """What launches give that write into the arrays by themselves, as far as it has yet to be evaluated."""
        return [written for layer in self.layers if (written := layer.take_written()) is not None]


def _joined(blocks: Sequence[Array]) -> Array:
    """[n, bytes]: no copy where the blocks follow each other in memory, as a reader's do."""
    first, size = blocks[0].ctypes.data, blocks[0].nbytes
    if all(block.ctypes.data == first + index * size for index, block in enumerate(blocks)):
        return np.lib.stride_tricks.as_strided(blocks[0], (len(blocks), size), (size, 1))
    return np.stack(blocks)


def make_arenas(spec: CacheSpec, room: int = 0) -> list[GroupArena]:
    """One empty arena per cache group, in the spec's order; each may come to take `room` bytes."""
    return [GroupArena(group, room) for group in spec.groups]
