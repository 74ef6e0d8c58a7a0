"""Arenas: the RAM in which keys and values of all cached blocks lie, as steps write and read them.

Of each layer and side: `data` uint32 [num_blocks, H_kv, 256, D*bits/32], `scales` and `biases` float16
[num_blocks, H_kv, 256, D/group_size] (`kv/packed.py`). What is not quantised has `data` only: 16-bit floats
[num_blocks, H_kv, 256, D].
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
    """A run of tokens inside one block: tokens `start … stop-1` of a step go to `offset …` of slot `block_id`."""

    block_id: int
    offset: int
    start: int
    stop: int


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
        resize(self._arenas, capacity)

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
