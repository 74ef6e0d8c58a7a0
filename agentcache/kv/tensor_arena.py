"""The RAM in which one tensor of all blocks of a group lies.

Slice and scatter assignments run in place as long as nothing else holds the array, so nothing here hands it out except
inside one step's graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.backing import Exact, make_backing
from agentcache.kv.spec import TensorSpec

_ALL = slice(None)
_RESIZED_AT_ONCE = 128 << 20  # bytes that may be there twice meanwhile


class TensorArena:
    """One tensor of a group's blocks: `array` [at least `capacity`, *its shape in a block of 256 tokens].

    Do not keep `array`: a held reference turns every write into a copy.

    Args:
        most: blocks that there may come to be; as long as there are no more, the arena grows without a copy where the
            device lets it (`kv/backing.py`).

    Attributes:
        capacity: blocks that there are.
        is_due: whether something has been assigned to it since it was last given to be evaluated (`take_due`).
    """

    def __init__(self, spec: TensorSpec, most: int = 0) -> None:
        self.spec = spec
        self._backing, self.array = make_backing(spec, most)
        self.capacity = 0
        self.is_due = False

    def resize(self, capacity: int) -> None:
        """Have `capacity` blocks, between steps: the first ones that there were, and behind them zeros. Lazy."""
        if capacity > self._backing.most:
            self._backing = Exact()
        self.array = self._backing.resized(self.array, self.capacity, capacity)
        self.capacity = capacity

    def assign(self, index: Any, new: mx.array) -> None:
        """Slice or scatter assignment; lazy. In place once nothing else holds the array, and no step reads it."""
        self.array[index] = new
        self.is_due = True

    def tokens(self, block_id: int, num_tokens: int) -> mx.array:
        """A block's first `num_tokens` tokens; lazy."""
        axis = self.spec.token_axis
        # With one index for all: a block taken out first would be copied.
        return self.array[block_id] if axis is None else self.array[block_id, *(_ALL,) * axis, :num_tokens]

    def memory(self) -> memoryview:
        """Where the array lies, as bytes; what is due to be written there is written first.

        Of a device that shares its memory with us, and between steps. Let go of it before the next write of a step:
        while somebody holds it, that write is a copy of the whole array.
        """
        return memoryview(self.array).cast("B")

    def upload(self, block_ids: Sequence[int], blocks: mx.array) -> None:
        """Write whole blocks, [n, ...]; what they lack of 256 tokens becomes zeros. Lazy.

        A slice for slots that follow each other: scatters are compiled when they are first used, which takes seconds
        on CUDA, in the middle of somebody's turn.
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
    """Have `capacity` blocks of each of these, between steps.

    Where that is a copy, it is one of many together: a model has hundreds, and a GPU that is waited for after each of
    them takes twice as long.
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
    """Copy a block of some tensors of one group, while no step is under way. It is read at once, and written lazily:

    MLX writes in place where nobody reads any more, and copies the whole array where somebody still does.
    """
    tensors = list(tensors)
    blocks = [mx.contiguous(tensor.array[source : source + 1]) for tensor in tensors]
    mx.eval(blocks)
    mx.synchronize()  # only then has the device let go of what it has read
    for tensor, block in zip(tensors, blocks, strict=True):
        tensor.assign(slice(target, target + 1), block)


def has_due(tensors: Iterable[TensorArena]) -> bool:
    """Whether something was assigned to any of these since `take_due`."""
    return any(tensor.is_due for tensor in tensors)


def take_due(tensors: Iterable[TensorArena]) -> list[mx.array]:
    """The arrays of those that something was assigned to since the last call, to be evaluated. Do not keep them."""
    due = [tensor for tensor in tensors if tensor.is_due]
    for tensor in due:
        tensor.is_due = False
    return [tensor.array for tensor in due]


def shares_memory() -> bool:
    """Whether the device computes in memory that this process reads and writes as its own."""
    return bool(mx.default_device() == mx.cpu or mx.metal.is_available())
