"""Arenas: the RAM of all cached blocks. Keys or values of a layer are `Packed` [num_blocks, H_kv, 256, ·].

Assignments run in place only while nothing else holds the array: a kept reference turns each write into a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import Holds
from agentcache.errors import BrokenInvariant
from agentcache.kv.backing import ARRAY_DTYPES, Exact, make_backing
from agentcache.kv.block_layout import Array, GroupMemory, aligned, block_tensors, first_float
from agentcache.kv.packed import dequantise, quantise
from agentcache.kv.packed_arrays import Packed
from agentcache.kv.packing import PARTS, ByChannel, LayerPacking, Packing
from agentcache.kv.raw_arrays import upload
from agentcache.kv.spec import CacheSpec, GroupSpec, LayerSpec, TensorSpec, packed_tensors, sides

_ALL = slice(None)
_RESIZED_AT_ONCE = 128 << 20  # bytes


class GroupArena:
    """Tensors of one cache group. `room`: bytes; growth beyond may copy."""

    def __init__(self, spec: GroupSpec, room: int = 0) -> None:
        self.spec = spec
        most = room // spec.bytes_per_block
        self._tensors = {tensor.name: TensorArena(tensor, most) for tensor in spec.tensors}
        packing = spec.packing
        self.layers = [] if packing is None else [LayerArena(layer, packing, self._tensors) for layer in spec.layers]
        self._full: GroupArena | None = None

    @property
    def capacity(self) -> int:
        return next(iter(self._tensors.values())).capacity

    def grow(self, capacity: int) -> None:
        resize([tensor for tensor in self._tensors.values() if tensor.capacity < capacity], capacity)

    def shrink(self, capacity: int) -> None:
        resize([tensor for tensor in self._tensors.values() if tensor.capacity > capacity], capacity)

    def copy(self, source: int, target: int) -> None:
        copy_block(self._tensors.values(), source, target)

    def follow(self, full: GroupArena) -> None:
        """Take the open blocks of `full`'s layers."""
        self._full = full
        for layer, unfinished in zip(full.layers, self.layers, strict=True):
            layer.open = unfinished

    def reopen(self, source: int, target: int) -> None:
        """Copy a full block to an open one, between steps; as `copy_block`."""
        for layer in self._of_full.layers:
            layer.reopen([source], [target])

    def put_full(self, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write full blocks, uint8 [n] each, to open ones, between steps."""
        full = self._of_full
        for block_id, block in zip(block_ids, blocks, strict=True):
            arrays = {each.spec.name: mx.array(each.view(block)[None]) for each in block_tensors(full.spec, BLOCK_SIZE)}
            for layer in full.layers:
                layer.reopen_packed(layer.packed_of(arrays), [block_id])

    @property
    def _of_full(self) -> GroupArena:
        if self._full is None:
            raise BrokenInvariant(f"group {self.spec.name} has no open blocks")
        return self._full

    def snapshot(self, block_id: int, num_tokens: int) -> Array:
        """Copy a block's first tokens, uint8 [n], between steps."""
        if not shares_memory():
            return self._download(block_id, num_tokens)
        block = aligned(self.spec.bytes_of(num_tokens))
        for tensor in block_tensors(self.spec, num_tokens):
            memory = self._tensors[tensor.spec.name].memory()
            for slot, own in tensor.runs(block_id):
                block.data[own] = memory[slot]
        return block

    def _download(self, block_id: int, num_tokens: int) -> Array:
        tensors = (self._tensors[tensor.spec.name] for tensor in block_tensors(self.spec, num_tokens))
        parts = [tensor.tokens(block_id, num_tokens).reshape(-1).view(mx.uint8) for tensor in tensors]
        return np.array(mx.concatenate(parts))

    def memory(self) -> GroupMemory | None:
        """Memory to read files into, between steps. Release it before any other use of the arena.

        None if the device has separate memory, or blocks are mostly floats.
        """
        first = first_float(self.spec, BLOCK_SIZE)
        if not shares_memory() or 2 * first < self.spec.bytes_per_block:
            return None
        num_integers = sum(tensor.end <= first for tensor in block_tensors(self.spec, BLOCK_SIZE))
        return GroupMemory([(each.memory(), each.spec.slot_bytes) for each in self._tensors.values()], num_integers)

    def put(self, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks, uint8 [n] each, between steps. They may change afterwards."""
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
    first, size = blocks[0].ctypes.data, blocks[0].nbytes
    if all(block.ctypes.data == first + index * size for index, block in enumerate(blocks)):
        return np.lib.stride_tricks.as_strided(blocks[0], (len(blocks), size), (size, 1))
    return np.stack(blocks)


def make_arenas(spec: CacheSpec, room: int = 0) -> list[GroupArena]:
    arenas = [GroupArena(group, room) for group in spec.groups]
    for before, arena in pairwise(arenas):
        if arena.spec.holds is Holds.OPEN:
            arena.follow(before)
    return arenas


class LayerArena:
    """Keys and, except for MLA, values of one layer. `tensors`: the group's, or None for its own.

    `open`: arena of blocks that are not full yet, if they have another packing.
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
        self._open: LayerArena | None = None
        unfinished = packing.while_open if isinstance(packing, LayerPacking) else None
        if tensors is None and unfinished is not None:
            self.open = LayerArena(layer, unfinished)
        self._is_due = False

    @cached_property
    def is_alike(self) -> bool:
        keys, values = self.keys, self.values
        return values is not None and (keys.dim, keys.quantisation) == (values.dim, values.quantisation)

    @property
    def both(self) -> tuple[SideArena, SideArena]:
        """Keys and values, not for MLA."""
        assert self.values is not None
        return self.keys, self.values

    @property
    def open(self) -> LayerArena | None:
        return self._open

    @open.setter
    def open(self, unfinished: LayerArena | None) -> None:
        self._open = unfinished
        if unfinished is not None:
            for (_, side), (_, other) in zip(self.sides, unfinished.sides, strict=True):
                side.open = other

    @property
    def appended(self) -> LayerArena:
        """Arena of the blocks that tokens are appended to."""
        return self._open or self

    @property
    def own_arrays(self) -> list[mx.array]:
        """Data, scales and biases of keys, then of values, without those of `open`."""
        return [array for _, side in self.sides for array in side.arrays()]

    @property
    def sides(self) -> list[tuple[str, SideArena]]:
        keys = [("key_cache", self.keys)]
        return keys if self.values is None else [*keys, ("value_cache", self.values)]

    def grow(self, capacity: int) -> None:
        for _, side in self.sides:
            if side.capacity < capacity:
                side.grow(capacity)
        if self.open is not None:
            self.open.grow(capacity)

    def seal(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Pack full blocks in slots `sources` of `open` into slots `targets`. Lazy."""
        assert self.open is not None
        ids = mx.array(sources, mx.int32)
        for (_, side), (_, unfinished) in zip(self.sides, self.open.sides, strict=True):
            values = dequantise(unfinished.gather(ids), unfinished.quantisation, mx.float32)
            side.write_blocks(quantise(values, side.quantisation), targets)

    def reopen(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy full blocks to slots `targets` of `open`, between steps; as `copy_block`."""
        ids = mx.array(sources, mx.int32)
        self.reopen_packed([side.gather(ids) for _, side in self.sides], targets)

    def reopen_packed(self, blocks: Sequence[Packed], targets: Sequence[int]) -> None:
        """`reopen`, of full blocks by side, [n, H_kv, 256, ·]."""
        assert self.open is not None
        made = [
            quantise(dequantise(packed, side.quantisation, mx.float32), unfinished.quantisation)
            for packed, (_, side), (_, unfinished) in zip(blocks, self.sides, self.open.sides, strict=True)
        ]
        mx.eval(made)
        mx.synchronize()  # until then the device holds the source
        for packed, (_, unfinished) in zip(made, self.open.sides, strict=True):
            unfinished.write_blocks(packed, targets)

    def packed_of(self, arrays: Mapping[str, mx.array]) -> list[Packed]:
        """Keys, then values, of arrays by tensor name."""
        return [Packed(*(arrays[part.spec.name] for part in side.in_order)) for _, side in self.sides]

    def arrays(self) -> list[mx.array]:
        """Data, scales and biases of keys, then of values; then those of `open`."""
        return self.own_arrays if self.open is None else self.own_arrays + self.open.own_arrays

    def made_of(self, arrays: Iterator[mx.array]) -> LayerArena:
        """A copy over the next of `arrays`, for tracing: as `arrays()`, then the append kernel's result."""
        made = copy.copy(self)
        made.keys = self.keys.made_of(arrays)
        made.values = None if self.values is None else self.values.made_of(arrays)
        if self.open is not None:
            made.open = self.open.made_of(arrays)
        else:
            made.was_written(next(arrays))
        return made

    def was_written(self, written: mx.array) -> None:
        """Record the zero that a kernel returns after a write unknown to MLX: reads add it, so that they run later."""
        self.keys.written = written
        if self.values is not None:
            self.values.written = written
        self._is_due = True

    def take_written(self) -> mx.array | None:
        due, self._is_due = self._is_due, False
        return self.keys.written if due else None


@dataclass(frozen=True)
class Slot:
    """Tokens `start … stop-1` of a step, at `offset` in slot `block_id`."""

    block_id: int
    offset: int
    start: int
    stop: int


class _Traced(NamedTuple):
    array: mx.array


class SideArena:
    """Keys or values of one layer."""

    def __init__(self, num_heads: int, dim: int, quantisation: Packing, parts: Mapping[str, TensorArena]) -> None:
        self.num_heads = num_heads
        self.dim = dim
        self.quantisation = quantisation
        self.parts = parts
        self._arenas = self.in_order = tuple(parts[part] for part in PARTS if part in parts)
        self.written: mx.array | None = None  # as in `was_written`
        self.open: SideArena | None = None  # blocks that are not full yet, if packed in another way

    def made_of(self, arrays: Iterator[mx.array]) -> SideArena:
        made = copy.copy(self)
        made._arenas = tuple(cast(TensorArena, _Traced(next(arrays))) for _ in self._arenas)
        return made

    @property
    def capacity(self) -> int:
        return self._arenas[0].capacity

    def grow(self, capacity: int) -> None:
        resize(self._arenas, capacity)

    def write_slots(self, packed: Packed, slots: Sequence[Slot], head: int = 0) -> None:
        """Write one row's tokens, [1, at least `head` + H, n, ·]."""
        heads = slice(head, head + self.num_heads)
        for part, new in zip(self._arenas, packed.parts, strict=True):
            for slot in slots:
                end = slot.offset + slot.stop - slot.start
                part.assign((slot.block_id, _ALL, slice(slot.offset, end)), new[0, heads, slot.start : slot.stop])

    def write_scattered(self, packed: Packed, block_ids: mx.array, offsets: mx.array, head: int = 0) -> None:
        """Write [B, at least `head` + H, n, ·]; slots and offsets [B*n]."""
        heads = slice(head, head + self.num_heads)
        for part, new in zip(self._arenas, packed.parts, strict=True):
            tokens = new[:, heads].swapaxes(1, 2).reshape(-1, self.num_heads, new.shape[-1])
            part.assign((block_ids, _ALL, offsets), tokens)

    def write_blocks(self, packed: Packed, block_ids: Sequence[int]) -> None:
        """Write whole blocks, [n, H, 256, ·]. Lazy. No scatter: it compiles for seconds."""
        for part, new in zip(self._arenas, packed.parts, strict=True):
            for index, block_id in enumerate(block_ids):
                part.assign(block_id, new[index])

    def gather(self, block_ids: mx.array) -> Packed:
        """Blocks [..., H, 256, ·] for `block_ids` [...]."""
        block_ids = self._behind_writes(block_ids)
        return Packed(*[part.array[block_ids] for part in self._arenas])

    @property
    def forms(self) -> list[SideArena]:
        """This arena, and that of open blocks if there is one."""
        return [self] if self.open is None else [self, self.open]

    def form(self, *, is_open: bool) -> SideArena:
        """This arena, or that of open blocks."""
        if not is_open:
            return self
        assert self.open is not None
        return self.open

    def blocks(self, block_ids: mx.array) -> mx.array:
        """Values of blocks, float32 [n, H, 256, D]."""
        return dequantise(self.gather(block_ids), self.quantisation, mx.float32)

    def tokens(self, block_ids: mx.array, offsets: mx.array) -> mx.array:
        """Values of tokens, float32 [n, H, D]; both arguments [n]."""
        parts = [self._rows(part, block_ids, offsets) for part in PARTS if part in self.parts]
        return dequantise(Packed(*parts), self.quantisation, mx.float32).squeeze(2)

    def steps(self, block_ids: mx.array, offsets: mx.array) -> mx.array:
        """Distances between the values of codes, float32 [n, H, ·]; arguments as in `tokens`."""
        return self._rows("scales", block_ids, offsets).astype(mx.float32).squeeze(2)

    def _rows(self, part: str, block_ids: mx.array, offsets: mx.array) -> mx.array:
        """A part of tokens, [n, H, 1, ·]."""
        if isinstance(self.quantisation, ByChannel) and part != "data":
            offsets = offsets // self.quantisation.group_tokens
        return self.parts[part].array[self._behind_writes(block_ids), :, offsets][:, :, None]

    def _behind_writes(self, block_ids: mx.array) -> mx.array:
        return block_ids if self.written is None else block_ids + self.written

    def copy(self, source: int, target: int) -> None:
        copy_block(self._arenas, source, target)

    def arrays(self) -> list[mx.array]:
        return [part.array for part in self._arenas]


class TensorArena:
    """One tensor of a group's blocks: `array` [at least `capacity`, *block shape].

    `most`: blocks; growth beyond copies. `is_due`: assigned since the last `take_due`.
    """

    def __init__(self, spec: TensorSpec, most: int = 0) -> None:
        self.spec = spec
        self._backing, self.array = make_backing(spec, most)
        self.capacity = 0
        self.is_due = False

    def resize(self, capacity: int) -> None:
        """Resize between steps; new blocks are zeros. Lazy."""
        if capacity > self._backing.most:
            self._backing = Exact()
        self.array = self._backing.resized(self.array, self.capacity, capacity)
        self.capacity = capacity

    def assign(self, index: Any, new: mx.array) -> None:
        """Assign lazily."""
        self.array[index] = new
        self.is_due = True

    def tokens(self, block_id: int, num_tokens: int) -> mx.array:
        """A block's first tokens. Lazy."""
        axis = self.spec.token_axis
        # Indexing the block first would copy it.
        return self.array[block_id] if axis is None else self.array[block_id, *(_ALL,) * axis, :num_tokens]

    def memory(self) -> memoryview:
        """The array's bytes, between steps, if `shares_memory`. Release before the next write."""
        return memoryview(self.array).cast("B")

    def upload(self, block_ids: Sequence[int], blocks: mx.array) -> None:
        """Write blocks [n, ...], padded with zeros. Lazy. No scatter: it compiles for seconds."""
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
    """Resize between steps, evaluating copies in batches."""
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
    """Copy a block between steps. Reads at once, writes lazily."""
    tensors = list(tensors)
    blocks = [mx.contiguous(tensor.array[source : source + 1]) for tensor in tensors]
    mx.eval(blocks)
    mx.synchronize()  # until then the device holds the source
    for tensor, block in zip(tensors, blocks, strict=True):
        tensor.assign(slice(target, target + 1), block)


def has_due(tensors: Iterable[TensorArena]) -> bool:
    return any(tensor.is_due for tensor in tensors)


def take_due(tensors: Iterable[TensorArena]) -> list[mx.array]:
    due = [tensor for tensor in tensors if tensor.is_due]
    for tensor in due:
        tensor.is_due = False
    return [tensor.array for tensor in due]


def shares_memory() -> bool:
    return bool(mx.default_device() == mx.cpu or mx.metal.is_available())
