"""RAM for one tensor of all blocks of a group.

Assignments run in place only while nothing else holds the array. So it is exposed only inside one step's graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.backing import Exact, make_backing
from agentcache.kv.spec import TensorSpec

_ALL = slice(None)
_RESIZED_AT_ONCE = 128 << 20  # bytes duplicated during a resize


class TensorArena:
    """One tensor of a group's blocks: `array` [at least `capacity`, *block shape].

    A kept reference to `array` turns every write into a copy.

    Args:
        most: expected maximum of blocks, up to which growth copies nothing if the device allows (`kv/backing.py`).

    Attributes:
        is_due: whether it has assignments since the last `take_due`.
    """

    def __init__(self, spec: TensorSpec, most: int = 0) -> None:
        self.spec = spec
        self._backing, self.array = make_backing(spec, most)
        self.capacity = 0
        self.is_due = False

    def resize(self, capacity: int) -> None:
        """Resize between steps: blocks are kept, new ones are zeros. Lazy."""
        if capacity > self._backing.most:
            self._backing = Exact()
        self.array = self._backing.resized(self.array, self.capacity, capacity)
        self.capacity = capacity

    def assign(self, index: Any, new: mx.array) -> None:
        """Slice or scatter assignment; lazy. In place if nothing else holds the array and no step reads it."""
        self.array[index] = new
        self.is_due = True

    def tokens(self, block_id: int, num_tokens: int) -> mx.array:
        """Return a block's first tokens; lazy."""
        axis = self.spec.token_axis
        # One index expression: indexing the block first would copy it.
        return self.array[block_id] if axis is None else self.array[block_id, *(_ALL,) * axis, :num_tokens]

    def memory(self) -> memoryview:
        """The array's bytes, after pending writes. Only between steps and if `shares_memory`.

        Release it before the next write, which copies the whole array otherwise.
        """
        return memoryview(self.array).cast("B")

    def upload(self, block_ids: Sequence[int], blocks: mx.array) -> None:
        """Write whole blocks [n, ...], padded with zeros to 256 tokens. Lazy.

        Adjacent slots use slices: on CUDA, the first scatter compiles for seconds, during a request.
        """
        axis = self.spec.token_axis
        if axis is not None and blocks.shape[axis + 1] < BLOCK_SIZE:
            missing = BLOCK_SIZE - blocks.shape[axis + 1]
            blocks = mx.pad(blocks, [(0, missing if each == axis + 1 else 0) for each in range(blocks.ndim)])
        begin = 0
        for end in range(1, len(block_ids) + 1):
            if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
                self.assign(slice(block_ids[begin], block_ids[end - 1] + 1), blocks[begin:end])
                begin = end


def resize(tensors: Iterable[TensorArena], capacity: int) -> None:
    """Resize tensors between steps.

    Copies are evaluated in batches, because waiting after each of hundreds is slow on a GPU.
    """
    resized, num_bytes = list[mx.array](), 0
    for tensor in tensors:
        tensor.resize(capacity)
        resized.append(tensor.array)
        num_bytes += tensor.array.nbytes
        if num_bytes >= _RESIZED_AT_ONCE:
            mx.eval(resized)
            resized, num_bytes = [], 0
    mx.eval(resized)


def copy_block(tensors: Iterable[TensorArena], source: int, target: int) -> None:
    """Copy a block of some tensors of one group, between steps. Reads at once, writes lazily.

    MLX copies the whole array on a write while a reader still holds it.
    """
    tensors = list(tensors)
    blocks = [mx.contiguous(tensor.array[source : source + 1]) for tensor in tensors]
    mx.eval(blocks)
    mx.synchronize()  # until then the device holds the source
    for tensor, block in zip(tensors, blocks, strict=True):
        tensor.assign(slice(target, target + 1), block)


def has_due(tensors: Iterable[TensorArena]) -> bool:
    return any(tensor.is_due for tensor in tensors)


def take_due(tensors: Iterable[TensorArena]) -> list[mx.array]:
    """Return arrays with assignments since the last call, to evaluate. Do not keep them."""
    due = [tensor for tensor in tensors if tensor.is_due]
    for tensor in due:
        tensor.is_due = False
    return [tensor.array for tensor in due]


def shares_memory() -> bool:
    """Whether this process can access the device's memory."""
    return bool(mx.default_device() == mx.cpu or mx.metal.is_available())
