"""All blocks of a cache group, and transfers of their bytes.

Memory shared with the device is read and written in place between steps; other devices need uploads.
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
        room: expected maximum bytes; further growth may copy.

    Attributes:
        layers: KV arenas; empty for a group of other tensors.
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
        resize([tensor for tensor in self._tensors.values() if tensor.capacity < capacity], capacity)

    def shrink(self, capacity: int) -> None:
        resize([tensor for tensor in self._tensors.values() if tensor.capacity > capacity], capacity)

    def copy(self, source: int, target: int) -> None:
        copy_block(self._tensors.values(), source, target)

    def snapshot(self, block_id: int, num_tokens: int) -> Array:
        """Copy a block's first tokens, uint8 [n] as in `block_layout`, between steps."""
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
        tensors = (self._tensors[tensor.spec.name] for tensor in block_tensors(self.spec, num_tokens))
        parts = [tensor.tokens(block_id, num_tokens).reshape(-1).view(mx.uint8) for tensor in tensors]
        return np.array(mx.concatenate(parts))

    def memory(self) -> GroupMemory | None:
        """Memory of the slots, for reading files into, between steps.

        None if the device has separate memory, or most of a block is floats. Release it before any other use of the
        arena.
        """
        first = first_float(self.spec, BLOCK_SIZE)
        if not shares_memory() or 2 * first < self.spec.bytes_per_block:
            return None
        num_integers = sum(tensor.end <= first for tensor in block_tensors(self.spec, BLOCK_SIZE))
        return GroupMemory([(each.memory(), each.spec.slot_bytes) for each in self._tensors.values()], num_integers)

    def put(self, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks into slots, between steps.

        Args:
            blocks: uint8 [n] each as in `block_layout`, at most 256 tokens; may change after the call.
        """
        if shares_memory():
            self._put_in_place(block_ids, blocks)
            return
        sizes = [block.nbytes for block in blocks]
        for size in set(sizes):
            indices = [index for index, each in enumerate(sizes) if each == size]
            self._upload([block_ids[index] for index in indices], [blocks[index] for index in indices])

    def _put_in_place(self, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        layouts = [block_tensors(self.spec, self.spec.tokens_in(block.nbytes)) for block in blocks]
        sources = [block.data for block in blocks]
        for index, arena in enumerate(self._tensors.values()):  # in block byte order
            memory, slot_bytes = arena.memory(), arena.spec.slot_bytes
            for block_id, layout, source in zip(block_ids, layouts, sources, strict=True):
                tensor = layout[index]
                if tensor.end - tensor.begin < slot_bytes:
                    memory[block_id * slot_bytes : (block_id + 1) * slot_bytes] = bytes(slot_bytes)
                for slot, own in tensor.runs(block_id):
                    memory[slot] = source[own]

    def _upload(self, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        num_tokens, count = self.spec.tokens_in(blocks[0].nbytes), len(blocks)
        there = upload(_joined(blocks))
        for tensor in block_tensors(self.spec, num_tokens):
            own = mx.contiguous(there[:, tensor.begin : tensor.end])
            shape = (count, *tensor.spec.block_shape(num_tokens))
            self._tensors[tensor.spec.name].upload(block_ids, own.view(ARRAY_DTYPES[tensor.spec.dtype]).reshape(shape))

    @property
    def tensors(self) -> Iterable[TensorArena]:
        return self._tensors.values()

    def take_written(self) -> list[mx.array]:
        return [written for layer in self.layers if (written := layer.take_written()) is not None]


def _joined(blocks: Sequence[Array]) -> Array:
    """[n, bytes]; a view if the blocks are adjacent, as a reader's are."""
    first, size = blocks[0].ctypes.data, blocks[0].nbytes
    if all(block.ctypes.data == first + index * size for index, block in enumerate(blocks)):
        return np.lib.stride_tricks.as_strided(blocks[0], (len(blocks), size), (size, 1))
    return np.stack(blocks)


def make_arenas(spec: CacheSpec, room: int = 0) -> list[GroupArena]:
    """One empty arena per group, each for `room` bytes."""
    return [GroupArena(group, room) for group in spec.groups]
