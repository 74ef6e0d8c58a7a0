"""Where in a block's bytes each tensor lies, for the files and for the arenas that are filled from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentcache.kv.spec import GroupSpec, LayerSpec

Array = NDArray[Any]

DATA: np.dtype[Any] = np.dtype("<u4")
SCALE: np.dtype[Any] = np.dtype("<f2")
PARTS = {"data": DATA, "scales": SCALE, "biases": SCALE}  # by alignment, widest first
_SAFETENSORS_NAMES = {DATA: "U32", SCALE: "F16"}
_ANY_POSITION = "@"  # in a name that holds for blocks at every position


@dataclass(frozen=True)
class BlockTensor:
    """One tensor of a group's blocks: [num_heads, k, width] in a block of k tokens.

    Args:
        layer: index of the layer.
        side: `key_cache` or `value_cache`.
        part: one of PARTS.
        offset: bytes before it, for each token of the block.
    """

    layer: int
    side: str
    part: str
    num_heads: int
    width: int
    offset: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return PARTS[self.part]

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * self.width * self.dtype.itemsize

    def shape(self, num_tokens: int) -> tuple[int, int, int]:
        return self.num_heads, num_tokens, self.width

    def view(self, blocks: Array, num_tokens: int) -> Array:
        """The tensor in blocks [..., bytes] of uint8, all of `num_tokens` tokens, as [..., num_heads, k, width]."""
        begin = num_tokens * self.offset
        own = blocks[..., begin : begin + num_tokens * self.bytes_per_token].view(self.dtype)
        return own.reshape(*blocks.shape[:-1], *self.shape(num_tokens))


def tensor_name(layer: int, side: str, position: int | str, part: str) -> str:
    """Name of a tensor in a block file; `position` is the block's number in its sequence."""
    return f"cache.layers.{layer}.{side}.{position}.{part}"


@lru_cache(maxsize=256)
def block_tensors(group: GroupSpec) -> tuple[BlockTensor, ...]:
    """All tensors of a block of the group, in the order of its bytes.

    With k tokens: data uint32 ``[H_kv, k, D * bits / 32]``, scales and biases float16 ``[H_kv, k, D / group_size]``.
    A layer without values of its own (MLA) has a key cache only.
    """
    tensors: list[BlockTensor] = []
    offset = 0
    for part in PARTS:
        for layer in group.layers:
            for side, dim in _sides(layer):
                tensors.append(
                    BlockTensor(layer.index, side, part, layer.num_kv_heads, _width(group, part, dim), offset)
                )
                offset += tensors[-1].bytes_per_token
    return tuple(tensors)


def _sides(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    yield "key_cache", layer.key_dim
    if layer.value_dim:
        yield "value_cache", layer.value_dim


def _width(group: GroupSpec, part: str, dim: int) -> int:
    quantisation = group.quantisation
    return dim * quantisation.bits // 32 if part == "data" else dim // quantisation.group_size


def header_entries(group: GroupSpec, position: int, num_tokens: int) -> str:
    """The members of a safetensors header that describe the block's tensors, as JSON without the braces around it."""
    return _entries_anywhere(group, num_tokens).replace(_ANY_POSITION, str(position))


@lru_cache(maxsize=256)
def _entries_anywhere(group: GroupSpec, num_tokens: int) -> str:
    """Written once for all blocks: it was half of the time that it takes to read a small one."""
    entries = {
        tensor_name(tensor.layer, tensor.side, _ANY_POSITION, tensor.part): {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": tensor.shape(num_tokens),
            "data_offsets": [begin := num_tokens * tensor.offset, begin + num_tokens * tensor.bytes_per_token],
        }
        for tensor in block_tensors(group)
    }
    return json.dumps(entries, separators=(",", ":"))[1:-1]
