"""Arenas: the RAM in which all cached blocks lie, one array for each tensor of a group's blocks.

Of keys and values, per layer and side: `data` uint32 [num_blocks, H_kv, 256, D*bits/32], `scales` and `biases` float16
[num_blocks, H_kv, 256, D/group_size], as `mx.quantize` packs them: value = q * scale + bias, low nibble first. What is
not quantised has `data` only: 16-bit floats [num_blocks, H_kv, 256, D].
Slice and scatter assignments run in place as long as nothing else holds the arrays, so nothing here hands them out
except inside one step's graph. Where the device computes in the memory that this process sees (a CPU, unified memory),
blocks are read from files to where an array lies, or copied to there, while no step is under way; elsewhere they are
uploaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.backing import ARRAY_DTYPES, Exact, make_backing
from agentcache.kv.block_layout import Array, GroupMemory, block_tensors, first_float
from agentcache.kv.packing import PARTS, LayerPacking, Packing, Plain
from agentcache.kv.spec import CacheSpec, GroupSpec, LayerSpec, TensorSpec, packed_tensors, sides
from agentcache.kv.upload import upload

_ALL = slice(None)
_PLAIN_DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16}
# Quantised values within this limit can be unpacked in float16: q * scale is at most 15/7 of the largest value.
LARGEST_VALUE = 30000.0


class Packed(NamedTuple):
    """Values as they are kept.

    Quantised: `data` uint32 [..., D*bits/32], `scales` and `biases` float16 [..., D/group_size]. Else `data` alone
    [..., D]: float16, or the bits of bfloat16 as uint16.
    """

    data: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None

    @property
    def parts(self) -> tuple[mx.array, ...]:
        """Those that there are."""
        return tuple(part for part in self if part is not None)


# Packs [..., D] along the last axis.
Pack = Callable[[mx.array, Packing], Packed]


def quantise(x: mx.array, quantisation: Packing) -> Packed:
    """Quantise [..., D] of any float dtype along the last axis, in float32, keeping scales and biases in float16.

    NaN becomes 0 and values saturate: a slot is also read, masked, by rows it does not belong to, so nothing in it may
    turn into NaN or infinity there.
    """
    x = x.astype(mx.float32)
    limited = mx.clip(mx.where(mx.isnan(x), 0.0, x), -LARGEST_VALUE, LARGEST_VALUE)
    if isinstance(quantisation, Plain):
        rounded = limited.astype(_PLAIN_DTYPES[quantisation.dtype])
        return Packed(rounded.view(ARRAY_DTYPES[quantisation.dtype]))
    data, scales, biases = mx.quantize(limited, group_size=quantisation.group_size, bits=quantisation.bits)
    return Packed(data, scales.astype(mx.float16), biases.astype(mx.float16))


def dequantise(packed: Packed, quantisation: Packing, dtype: mx.Dtype) -> mx.array:
    """The values [..., D] that attention sees, computed in float32."""
    if isinstance(quantisation, Plain):
        return packed.data.view(_PLAIN_DTYPES[quantisation.dtype]).astype(dtype)
    assert packed.scales is not None and packed.biases is not None
    values = mx.dequantize(
        packed.data,
        packed.scales.astype(mx.float32),
        packed.biases.astype(mx.float32),
        group_size=quantisation.group_size,
        bits=quantisation.bits,
    )
    return values.astype(dtype)


@dataclass(frozen=True)
class Slot:
    """A run of tokens inside one block: tokens `start … stop-1` of a step go to `offset …` of slot `block_id`."""

    block_id: int
    offset: int
    start: int
    stop: int


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
        """Have `capacity` blocks, between steps: the first ones that there were, and behind them zeros."""
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


class _Traced(NamedTuple):
    """Stands for a tensor's arena where a step is traced: nothing can be assigned to it."""

    array: mx.array


class SideArena:
    """Keys or values of one layer.

    Args:
        parts: their tensors, those of `PARTS` that there are.
    """

    def __init__(self, num_heads: int, dim: int, quantisation: Packing, parts: Mapping[str, TensorArena]) -> None:
        self.num_heads = num_heads
        self.dim = dim
        self.quantisation = quantisation
        self.parts = parts
        self._arenas = tuple(parts[part] for part in PARTS if part in parts)
        self.written: mx.array | None = None  # what the last launch gave that wrote into the arrays by itself

    def made_of(self, arrays: Iterator[mx.array]) -> SideArena:
        """See `LayerArena.made_of`."""
        made = copy.copy(self)
        made._arenas = tuple(cast(TensorArena, _Traced(next(arrays))) for _ in self._arenas)
        return made

    @property
    def capacity(self) -> int:
        return self._arenas[0].capacity

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` blocks."""
        for part in self._arenas:
            part.resize(capacity)

    def write_slots(self, packed: Packed, slots: Sequence[Slot], head: int = 0) -> None:
        """Write one row's tokens run by run (slice assignment: the fastest way for long runs).

        Args:
            packed: [1, at least `head` + H, n, ·].
            head: the first of this side's heads in it.
        """
        heads = slice(head, head + self.num_heads)
        for part, new in zip(self._arenas, packed.parts, strict=True):
            for slot in slots:
                end = slot.offset + slot.stop - slot.start
                part.assign((slot.block_id, _ALL, slice(slot.offset, end)), new[0, heads, slot.start : slot.stop])

    def write_scattered(self, packed: Packed, block_ids: mx.array, offsets: mx.array, head: int = 0) -> None:
        """Write tokens of `packed` [B, at least `head` + H, n, ·] to slots `block_ids`, positions `offsets` in them.

        Args:
            block_ids, offsets: [B*n].
            head: the first of this side's heads in `packed`.
        """
        heads = slice(head, head + self.num_heads)
        for part, new in zip(self._arenas, packed.parts, strict=True):
            tokens = new[:, heads].swapaxes(1, 2).reshape(-1, self.num_heads, new.shape[-1])
            part.assign((block_ids, _ALL, offsets), tokens)

    def gather(self, block_ids: mx.array) -> Packed:
        """The blocks [..., H, 256, ·] for `block_ids` [...]."""
        block_ids = self._behind_writes(block_ids)
        return Packed(*[part.array[block_ids] for part in self._arenas])

    def gather_tokens(self, block_ids: mx.array, offsets: mx.array) -> Packed:
        """The tokens [n, H, ·] at `offsets` in `block_ids`, both [n]."""
        block_ids = self._behind_writes(block_ids)
        return Packed(*[part.array[block_ids, :, offsets] for part in self._arenas])

    def _behind_writes(self, block_ids: mx.array) -> mx.array:
        """The same; the device reads there after it has written."""
        return block_ids if self.written is None else block_ids + self.written  # a zero

    def copy(self, source: int, target: int) -> None:
        """See `copy_block`."""
        copy_block(self._arenas, source, target)

    def arrays(self) -> list[mx.array]:
        """The arrays themselves, to evaluate them. Do not keep them: a held reference turns every write into a copy."""
        return [part.array for part in self._arenas]


class LayerArena:
    """Keys and, except for MLA, values of one layer.

    Args:
        packing: of keys and values, or of both.
        tensors: of the layer's group, by name; without them the layer stands alone and has its own.
    """

    def __init__(
        self, layer: LayerSpec, packing: Packing | LayerPacking, tensors: Mapping[str, TensorArena] | None = None
    ) -> None:
        self.layer = layer
        made = {}
        for side, dim in sides(layer):
            own = packing.side(side) if isinstance(packing, LayerPacking) else packing
            specs = packed_tensors(layer, side, dim, own)
            parts = {part: TensorArena(spec) if tensors is None else tensors[spec.name] for part, spec in specs.items()}
            made[side] = SideArena(layer.num_kv_heads, dim, own, parts)
        self.keys, self.values = made["key_cache"], made.get("value_cache")
        self._is_due = False

    @cached_property
    def is_alike(self) -> bool:
        """Whether it has keys and values of one size, packed in one way."""
        keys, values = self.keys, self.values
        return values is not None and (keys.dim, keys.quantisation) == (values.dim, values.quantisation)

    @property
    def sides(self) -> list[tuple[str, SideArena]]:
        """(name in files, arena) of what this layer stores."""
        keys = [("key_cache", self.keys)]
        return keys if self.values is None else [*keys, ("value_cache", self.values)]

    def grow(self, capacity: int) -> None:
        for _, side in self.sides:
            if side.capacity < capacity:
                side.grow(capacity)

    def arrays(self) -> list[mx.array]:
        """Data, scales and biases of keys, then of values. As `SideArena.arrays`: do not keep them."""
        return [array for _, side in self.sides for array in side.arrays()]

    def made_of(self, arrays: Iterator[mx.array]) -> LayerArena:
        """A layer like this one to trace a step with: of the next of these arrays, in the order of `arrays()` and
        behind them what `append` gave. It can be read, and written by kernels."""
        made = copy.copy(self)
        made.keys = self.keys.made_of(arrays)
        made.values = None if self.values is None else self.values.made_of(arrays)
        made.was_written(next(arrays))
        return made

    def was_written(self, written: mx.array) -> None:
        """A launch writes into the arrays by itself, which MLX knows nothing of.

        So it is due by itself (`take_written`), and who reads the arrays in its graph is given the zero that it gives.
        """
        self.keys.written = written
        if self.values is not None:
            self.values.written = written
        self._is_due = True

    def take_written(self) -> mx.array | None:
        """What the last launch gave that has not been given to be evaluated yet; None where there is nothing due."""
        due, self._is_due = self._is_due, False
        return self.keys.written if due else None


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
        for tensor in self._tensors.values():
            if tensor.capacity < capacity:
                tensor.resize(capacity)

    def shrink(self, capacity: int) -> None:
        """Follow the block pool's capacity downwards."""
        for tensor in self._tensors.values():
            if tensor.capacity > capacity:
                tensor.resize(capacity)

    def copy(self, source: int, target: int) -> None:
        """See `copy_block`."""
        copy_block(self._tensors.values(), source, target)

    def snapshot(self, block_id: int, num_tokens: int) -> Array:
        """Bytes of a block's first `num_tokens` tokens, uint8 [n] as `block_layout` has them, copied once.

        While no step is under way.
        """
        if not shares_memory():
            return self._download(block_id, num_tokens)
        block = np.empty(self.spec.bytes_of(num_tokens), np.uint8)
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
    return mx.default_device() == mx.cpu or mx.metal.is_available()


def _joined(blocks: Sequence[Array]) -> Array:
    """[n, bytes]: no copy where the blocks follow each other in memory, as a reader's do."""
    first, size = blocks[0].ctypes.data, blocks[0].nbytes
    if all(block.ctypes.data == first + index * size for index, block in enumerate(blocks)):
        return np.lib.stride_tricks.as_strided(blocks[0], (len(blocks), size), (size, 1))
    return np.stack(blocks)


def make_arenas(spec: CacheSpec, room: int = 0) -> list[GroupArena]:
    """One empty arena per cache group, in the spec's order; each may come to take `room` bytes."""
    return [GroupArena(group, room) for group in spec.groups]
