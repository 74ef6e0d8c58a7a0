"""Arenas: RAM buffers that hold the KV of all cached blocks.

Each side of a layer has `data` uint32 [num_blocks, H_kv, 256, D*bits/32], `scales` and `biases` float16 [num_blocks,
H_kv, 256, D/group_size]; unquantised: `data` alone, 16-bit floats [num_blocks, H_kv, 256, D].
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import mlx.core as mx

from agentcache.kv.packed import Packed
from agentcache.kv.packing import PARTS, LayerPacking, Packing
from agentcache.kv.spec import LayerSpec, packed_tensors, sides
from agentcache.kv.tensor_arena import TensorArena, copy_block, resize

_ALL = slice(None)


@dataclass(frozen=True)
class Slot:
    """Tokens `start … stop-1` of a step, which go to `offset …` of slot `block_id`."""

    block_id: int
    offset: int
    start: int
    stop: int


class _Traced(NamedTuple):
    """A tensor's arena in a traced step; not assignable."""

    array: mx.array


class SideArena:
    """Keys or values of one layer."""

    def __init__(self, num_heads: int, dim: int, quantisation: Packing, parts: Mapping[str, TensorArena]) -> None:
        self.num_heads = num_heads
        self.dim = dim
        self.quantisation = quantisation
        self.parts = parts
        self._arenas = tuple(parts[part] for part in PARTS if part in parts)
        self.written: mx.array | None = None  # zero, from the last kernel that wrote in place

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
        """Write one row's tokens run by run, the fastest way if runs are long.

        Args:
            packed: [1, at least `head` + H, n, ·]; this side's heads begin at `head`.
        """
        heads = slice(head, head + self.num_heads)
        for part, new in zip(self._arenas, packed.parts, strict=True):
            for slot in slots:
                end = slot.offset + slot.stop - slot.start
                part.assign((slot.block_id, _ALL, slice(slot.offset, end)), new[0, heads, slot.start : slot.stop])

    def write_scattered(self, packed: Packed, block_ids: mx.array, offsets: mx.array, head: int = 0) -> None:
        """Write tokens of `packed` [B, at least `head` + H, n, ·] to `block_ids` and `offsets`, both [B*n]."""
        heads = slice(head, head + self.num_heads)
        for part, new in zip(self._arenas, packed.parts, strict=True):
            tokens = new[:, heads].swapaxes(1, 2).reshape(-1, self.num_heads, new.shape[-1])
            part.assign((block_ids, _ALL, offsets), tokens)

    def gather(self, block_ids: mx.array) -> Packed:
        """Blocks [..., H, 256, ·] for `block_ids` [...]."""
        block_ids = self._behind_writes(block_ids)
        return Packed(*[part.array[block_ids] for part in self._arenas])

    def gather_tokens(self, block_ids: mx.array, offsets: mx.array) -> Packed:
        """Tokens [n, H, ·] at `offsets` in `block_ids`, both [n]."""
        block_ids = self._behind_writes(block_ids)
        return Packed(*[part.array[block_ids, :, offsets] for part in self._arenas])

    def _behind_writes(self, block_ids: mx.array) -> mx.array:
        """Make the device read `block_ids` only after the last in-place write."""
        return block_ids if self.written is None else block_ids + self.written

    def copy(self, source: int, target: int) -> None:
        copy_block(self._arenas, source, target)

    def arrays(self) -> list[mx.array]:
        """Return the arrays. Do not keep them: a held reference turns every write into a copy."""
        return [part.array for part in self._arenas]


class LayerArena:
    """Keys and, except for MLA, values of one layer. `tensors`: the group's, by name; None creates separate ones."""

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
        keys, values = self.keys, self.values
        return values is not None and (keys.dim, keys.quantisation) == (values.dim, values.quantisation)

    @property
    def sides(self) -> list[tuple[str, SideArena]]:
        keys = [("key_cache", self.keys)]
        return keys if self.values is None else [*keys, ("value_cache", self.values)]

    def grow(self, capacity: int) -> None:
        for _, side in self.sides:
            if side.capacity < capacity:
                side.grow(capacity)

    def arrays(self) -> list[mx.array]:
        """Data, scales and biases of keys, then of values. Do not keep them."""
        return [array for _, side in self.sides for array in side.arrays()]

    def made_of(self, arrays: Iterator[mx.array]) -> LayerArena:
        """A copy over the next `arrays`, for tracing: `arrays()`, then the result of `append`.

        Kernels can write to it.
        """
        made = copy.copy(self)
        made.keys = self.keys.made_of(arrays)
        made.values = None if self.values is None else self.values.made_of(arrays)
        made.was_written(next(arrays))
        return made

    def was_written(self, written: mx.array) -> None:
        """Record the result of a kernel that wrote in place, unknown to MLX.

        It is zero; reads add it to their input to run after the write. It must be evaluated (`take_written`).
        """
        self.keys.written = written
        if self.values is not None:
            self.values.written = written
        self._is_due = True

    def take_written(self) -> mx.array | None:
        due, self._is_due = self._is_due, False
        return self.keys.written if due else None
