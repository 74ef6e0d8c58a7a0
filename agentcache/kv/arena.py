"""Q4 arenas: the RAM in which all cached blocks lie, one set of arrays per layer.

Per layer and side (keys, values): `data` uint32 [num_blocks, H_kv, 256, D*bits/32], `scales` and `biases` float16
[num_blocks, H_kv, 256, D/group_size], as `mx.quantize` packs them: value = q * scale + bias, low nibble first.
Slice and scatter assignments run in place as long as nothing else holds the arrays, so nothing here hands them out
except inside one step's graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.kv.block_layout import PARTS, Array, block_tensors, tensor_name
from agentcache.kv.spec import CacheSpec, GroupSpec, LayerSpec, Quantisation

_PARTS = tuple(PARTS)
# Quantised values within this limit can be unpacked in float16: q * scale is at most 15/7 of the largest value.
_LARGEST_VALUE = 30000.0


@dataclass
class Packed:
    """Quantised values: `data` uint32 [..., D*bits/32], `scales` and `biases` float16 [..., D/group_size]."""

    data: mx.array
    scales: mx.array
    biases: mx.array

    def __iter__(self) -> Iterator[mx.array]:
        return iter((self.data, self.scales, self.biases))


def quantise(x: mx.array, quantisation: Quantisation) -> Packed:
    """Quantise [..., D] of any float dtype along the last axis, in float32, keeping scales and biases in float16.

    NaN becomes 0 and values saturate: a slot is also read, masked, by rows it does not belong to, so nothing in it may
    turn into NaN or infinity there.
    """
    finite = mx.nan_to_num(x.astype(mx.float32), nan=0.0, posinf=_LARGEST_VALUE, neginf=-_LARGEST_VALUE)
    limited = mx.clip(finite, -_LARGEST_VALUE, _LARGEST_VALUE)
    data, scales, biases = mx.quantize(limited, group_size=quantisation.group_size, bits=quantisation.bits)
    return Packed(data, scales.astype(mx.float16), biases.astype(mx.float16))


def dequantise(packed: Packed, quantisation: Quantisation, dtype: mx.Dtype) -> mx.array:
    """The values [..., D] that attention sees, computed in float32."""
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


class SideArena:
    """Keys or values of one layer."""

    def __init__(self, num_heads: int, dim: int, quantisation: Quantisation) -> None:
        self.num_heads = num_heads
        self.dim = dim
        self.quantisation = quantisation
        widths = (dim * quantisation.bits // 32, dim // quantisation.group_size, dim // quantisation.group_size)
        dtypes = (mx.uint32, mx.float16, mx.float16)
        self._arrays = [mx.zeros((0, num_heads, BLOCK_SIZE, w), d) for w, d in zip(widths, dtypes, strict=True)]

    @property
    def capacity(self) -> int:
        return int(self._arrays[0].shape[0])

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` blocks. Copies this side's arrays once; evaluated at once to free the old ones."""
        added = capacity - self.capacity
        for i, old in enumerate(self._arrays):
            self._arrays[i] = mx.concatenate([old, mx.zeros((added, *old.shape[1:]), old.dtype)])
            del old
            mx.eval(self._arrays[i])

    def shrink(self, capacity: int) -> None:
        """Keep the first `capacity` blocks and give the rest of the memory back."""
        for i, old in enumerate(self._arrays):
            self._arrays[i] = mx.contiguous(old[:capacity])
            del old
            mx.eval(self._arrays[i])

    def write_slots(self, packed: Packed, slots: Sequence[Slot]) -> None:
        """Write one row's tokens, [1, H, n, ·], run by run (slice assignment: the fastest way for long runs)."""
        for i, new in enumerate(packed):
            for slot in slots:
                end = slot.offset + slot.stop - slot.start
                self._arrays[i][slot.block_id, :, slot.offset : end] = new[0, :, slot.start : slot.stop]

    def write_scattered(self, packed: Packed, block_ids: mx.array, offsets: mx.array) -> None:
        """Write tokens [B, H, n, ·] to slots `block_ids`, places `offsets`, both [B*n]."""
        for i, new in enumerate(packed):
            self._arrays[i][block_ids, :, offsets] = new.swapaxes(1, 2).reshape(-1, self.num_heads, new.shape[-1])

    def gather(self, block_ids: mx.array) -> Packed:
        """The blocks [..., H, 256, ·] for `block_ids` [...]."""
        return Packed(*(array[block_ids] for array in self._arrays))

    def copy(self, source: int, target: int) -> None:
        for i, array in enumerate(self._arrays):
            self._arrays[i][target] = array[source]

    def put(self, block_ids: Sequence[int], part: str, blocks: Array) -> None:
        """Write one part of whole blocks [n, H, 256, ·]."""
        first, last = block_ids[0], block_ids[-1]
        # Neighbouring slots, as a restore usually gets them, are one slice: some times faster than a scatter.
        neighbours = list(block_ids) == list(range(first, last + 1))
        place = slice(first, last + 1) if neighbours else mx.array(block_ids)
        self._arrays[_PARTS.index(part)][place] = mx.array(blocks)

    def arrays(self) -> list[mx.array]:
        """The arrays themselves, to evaluate them. Do not keep them: a held reference turns every write into a copy."""
        return list(self._arrays)


class LayerArena:
    """Keys and, except for MLA, values of one layer."""

    def __init__(self, layer: LayerSpec, quantisation: Quantisation) -> None:
        self.layer = layer
        self.quantisation = quantisation
        self.keys = SideArena(layer.num_kv_heads, layer.key_dim, quantisation)
        self.values = SideArena(layer.num_kv_heads, layer.value_dim, quantisation) if layer.value_dim else None

    @property
    def sides(self) -> list[tuple[str, SideArena]]:
        """(name in files, arena) of what this layer stores."""
        sides = [("key_cache", self.keys)]
        return sides if self.values is None else [*sides, ("value_cache", self.values)]

    def grow(self, capacity: int) -> None:
        for _, side in self.sides:
            if side.capacity < capacity:
                side.grow(capacity)


class GroupArena:
    """All layers of one cache group."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.layers = [LayerArena(layer, spec.quantisation) for layer in spec.layers]

    @property
    def capacity(self) -> int:
        return self.layers[0].keys.capacity

    def grow(self, capacity: int) -> None:
        """Follow the block pool's capacity upwards; the new slots hold zeros."""
        for layer in self.layers:
            layer.grow(capacity)

    def shrink(self, capacity: int) -> None:
        """Follow the block pool's capacity downwards."""
        for layer in self.layers:
            for _, side in layer.sides:
                if side.capacity > capacity:
                    side.shrink(capacity)

    def copy(self, source: int, target: int) -> None:
        """Copy a block (copy-on-write). Lazy."""
        for layer in self.layers:
            for _, side in layer.sides:
                side.copy(source, target)

    def snapshot(self, block_id: int, position: int, num_tokens: int) -> dict[str, np.ndarray]:
        """Bytes of a block's first `num_tokens` tokens as numpy copies, named as in its file."""
        lazy = {
            tensor_name(layer.layer.index, name, position, part): array[block_id, :, :num_tokens]
            for layer in self.layers
            for name, side in layer.sides
            for part, array in zip(PARTS, side.arrays(), strict=True)
        }
        mx.eval(lazy)
        return {name: np.array(array) for name, array in lazy.items()}

    def put(self, block_ids: Sequence[int], blocks: Sequence[Array]) -> None:
        """Write blocks into slots `block_ids`.

        Args:
            blocks: bytes of each block's tensors, uint8 [n], as `block_layout` has them; at most 256 tokens.
        """
        sizes = [block.nbytes for block in blocks]
        for size in set(sizes):
            places = [place for place, each in enumerate(sizes) if each == size]
            self._put_equal([block_ids[place] for place in places], np.stack([blocks[place] for place in places]))

    def _put_equal(self, block_ids: Sequence[int], blocks: Array) -> None:
        """Write blocks [count, bytes] of the same length."""
        num_tokens = blocks.shape[1] // self.spec.bytes_per_token
        sides = {(layer.layer.index, name): side for layer in self.layers for name, side in layer.sides}
        for tensor in block_tensors(self.spec):
            # MLX copies a strided array with all that lies between: here, the other tensors.
            array = np.ascontiguousarray(_padded(tensor.view(blocks, num_tokens)))
            sides[tensor.layer, tensor.side].put(block_ids, tensor.part, array)

    def arrays(self) -> list[mx.array]:
        """All arrays, to evaluate pending writes."""
        return [array for layer in self.layers for _, side in layer.sides for array in side.arrays()]


def _padded(blocks: Array) -> Array:
    """Blocks [count, H, k, ·] with zeros behind the k tokens, up to 256."""
    missing = BLOCK_SIZE - blocks.shape[2]
    return np.pad(blocks, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else blocks


def make_arenas(spec: CacheSpec) -> list[GroupArena]:
    """One empty arena per cache group, in the spec's order."""
    return [GroupArena(group) for group in spec.groups]
