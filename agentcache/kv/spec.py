"""The shape of a model's cache, as data: part of every key and file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE, STATE_GROUP
from agentcache.blocks.pool import Holds, holds_of
from agentcache.errors import BrokenInvariant
from agentcache.kv.packing import PARTS, ByChannel, LayerPacking, Packing

POSITION = "@"
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # raw bits: NumPy has no bfloat16
    "U8": np.dtype("u1"),
}
# Recurrent state: MLX name to safetensors name.
STATE_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
}


@dataclass(frozen=True)
class LayerSpec:
    """Cached heads and dimensions of one layer.

    Args:
        index: number of layers computed before, in a second round too.
        num_kv_heads: 1 for MLA.
        value_dim: 0 if keys hold the values (MLA).
        window: most recent tokens attended to; None for all.
        nth: among the layer's caches.
    """

    index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    nth: int = 0


@dataclass(frozen=True)
class StateTensor:
    """One array of a recurrent layer's state. `shape` without batch axis; MLX's `dtype`."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RecurrentSpec:
    """One recurrent layer's state, as in mlx-lm's `ArraysCache`; None for entries that stay empty."""

    index: int
    tensors: tuple[StateTensor | None, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a group's blocks, in arenas and files.

    Args:
        name: in files, with `POSITION` for the block's index.
        shape: of one token, or of the block without `token_axis`.
        token_axis: in a block's shape; None if stored once per block.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    token_axis: int | None = 0

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @cached_property
    def own_bytes(self) -> int:
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @cached_property
    def slot_bytes(self) -> int:
        return self.own_bytes if self.token_axis is None else self.own_bytes * BLOCK_SIZE

    @cached_property
    def num_runs(self) -> int:
        """Contiguous pieces of a partial block in its slot."""
        return math.prod(self.shape[: self.token_axis or 0])

    def block_shape(self, num_tokens: int) -> tuple[int, ...]:
        if self.token_axis is None:
            return self.shape
        return self.shape[: self.token_axis] + (num_tokens,) + self.shape[self.token_axis :]


@dataclass(frozen=True)
class GroupSpec:
    """Tensors with blocks of their own, usually of one attention kind and span of depth.

    `name`: in addresses and files. `tensors`: in block byte order, widest dtypes first for alignment.
    `value_quantisation`: of values, if different. `holds`: blocks in this group. An open group follows the group of the
    same layers' full blocks; its window is 1: only the block of the next token is needed.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    window: int | None = None
    layers: tuple[LayerSpec, ...] = ()
    quantisation: Packing | None = None
    value_quantisation: Packing | None = None
    holds: Holds = Holds.ALL

    def __post_init__(self) -> None:
        if self.holds is Holds.OPEN and self.window != 1:
            raise BrokenInvariant(f"the open group {self.name} has the window {self.window}")
        sizes = [tensor.numpy_dtype.itemsize for tensor in self.tensors]
        if sizes != sorted(sizes, reverse=True):
            raise BrokenInvariant(f"the tensors of group {self.name} do not begin with the widest dtypes")
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise BrokenInvariant(f"two tensors of group {self.name} have one name")

    # Lookup keys for every file: comparison must be fast.
    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, GroupSpec) and self._text == other._text)

    def __hash__(self) -> int:
        return hash(self._text)

    @cached_property
    def _text(self) -> str:
        return repr(self)

    @cached_property
    def packing(self) -> LayerPacking | None:
        if self.quantisation is None:
            return None
        return LayerPacking(self.quantisation, self.value_quantisation or self.quantisation)

    @property
    def is_state(self) -> bool:
        return self.name == STATE_GROUP

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of a token in a full block."""
        return self._bytes_a_token if self.holds is not Holds.FULL else self.bytes_per_block // BLOCK_SIZE

    @cached_property
    def _bytes_a_token(self) -> int:
        return sum(tensor.own_bytes for tensor in self.tensors if tensor.token_axis is not None)

    def bytes_of(self, num_tokens: int) -> int:
        return self._bytes_once + num_tokens * self._bytes_a_token

    def tokens_in(self, num_bytes: int) -> int:
        """Tokens in a block of `num_bytes`; 256 if its size is fixed."""
        return (num_bytes - self._bytes_once) // self._bytes_a_token if self._bytes_a_token else BLOCK_SIZE

    @cached_property
    def _bytes_once(self) -> int:
        return sum(tensor.own_bytes for tensor in self.tensors if tensor.token_axis is None)

    @cached_property
    def bytes_per_block(self) -> int:
        return self.bytes_of(BLOCK_SIZE)

    def first_block_needed(self, num_tokens: int) -> int:
        """First block that the token at position `num_tokens` attends to."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // BLOCK_SIZE


@dataclass(frozen=True)
class CacheSpec:
    """A cache with its own blocks and addresses: a model's own, or one beside it.

    Args:
        groups, recurrent: in order of depth.
        rope: text that differs if rope does.
        beside: identity of a cache beside the model's own, with that one's digest; else empty.
        rank: such as `0 of 2`; empty for one process.
        sources: digest of the code that computes KV.
    """

    model_type: str
    num_attention_heads: int
    groups: tuple[GroupSpec, ...]
    rope: str = ""
    block_size: int = field(default=BLOCK_SIZE)
    recurrent: tuple[RecurrentSpec, ...] = ()
    beside: str = ""
    rank: str = ""
    sources: str = ""

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CacheSpec) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        fields = asdict(self, dict_factory=_without_new_defaults)
        return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def by_rank(self) -> tuple[CacheSpec, ...]:
        if not self.rank:
            return (self,)
        size = int(self.rank.rpartition(" ")[2])
        return tuple(replace(self, rank=f"{rank} of {size}") for rank in range(size))

    @cached_property
    def state_group(self) -> GroupSpec | None:
        if not self.recurrent:
            return None
        tensors = [
            TensorSpec(state_name(cache, number), STATE_DTYPES[tensor.dtype], tensor.shape, token_axis=None)
            for cache, spec in enumerate(self.recurrent)
            for number, tensor in enumerate(spec.tensors)
            if tensor is not None
        ]
        return GroupSpec(STATE_GROUP, tuple(sorted(tensors, key=lambda each: -each.numpy_dtype.itemsize)))

    @cached_property
    def all_groups(self) -> tuple[GroupSpec, ...]:
        return self.groups if self.state_group is None else (*self.groups, self.state_group)

    @cached_property
    def holds(self) -> tuple[Holds, ...]:
        """As `holds_of`."""
        return holds_of(self.groups)

    @cached_property
    def lasting_groups(self) -> tuple[GroupSpec, ...]:
        """Groups but those of open blocks: each layer is in one."""
        return tuple(group for group in self.groups if group.holds is not Holds.OPEN)

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.lasting_groups)

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.lasting_groups)

    @cached_property
    def bits(self) -> float | None:
        """Mean bits of a key or value; None without KV."""
        kept = [
            (layer.num_kv_heads * dim, group.packing.side(side).bits)
            for group in self.lasting_groups
            if group.packing is not None
            for layer in group.layers
            for side, dim in sides(layer)
        ]
        if not kept:
            return None
        mean = sum(size * bits for size, bits in kept) / sum(size for size, _ in kept)
        return int(mean) if mean.is_integer() else round(mean, 2)

    def group(self, name: str) -> GroupSpec:
        return self._groups_by_name[name]

    @cached_property
    def _groups_by_name(self) -> dict[str, GroupSpec]:
        return {group.name: group for group in self.all_groups}


_NEW_DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("nth", 0),
    ("recurrent", ()),
    ("beside", ""),
    ("value_quantisation", None),
    ("rank", ""),
    ("sources", ""),
    ("holds", Holds.ALL),
)


def _without_new_defaults(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    """Omit newer fields with defaults: existing files keep their addresses."""
    return {name: value for name, value in entries if (name, value) not in _NEW_DEFAULTS}


def tensor_name(layer: LayerSpec, side: str, part: str) -> str:
    """Name in files. `side`: `key_cache` or `value_cache`; `part`: of `PARTS`."""
    owner = f"{layer.index}.{layer.nth}" if layer.nth else str(layer.index)
    return f"cache.layers.{owner}.{side}.{POSITION}.{part}"


def state_name(cache: int, number: int) -> str:
    return f"cache.recurrent.{cache}.{number}"


def sides(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    """Yield (name in files, dimension)."""
    yield "key_cache", layer.key_dim
    if layer.value_dim:
        yield "value_cache", layer.value_dim


def packed_tensors(layer: LayerSpec, side: str, dim: int, packing: Packing) -> dict[str, TensorSpec]:
    """Tensors by part, [H_kv, tokens, width]; scales and biases by channel [H_kv, groups, D]."""
    tensors = {}
    for part, (dtype, width) in packing.parts(dim).items():
        name, shape = tensor_name(layer, side, part), (layer.num_kv_heads, width)
        if isinstance(packing, ByChannel) and part != "data":
            by_group = (layer.num_kv_heads, BLOCK_SIZE // packing.group_tokens, width)
            tensors[part] = TensorSpec(name, dtype, by_group, token_axis=None)
        else:
            tensors[part] = TensorSpec(name, dtype, shape, token_axis=1)
    return tensors


def attention_group(
    name: str,
    layers: Sequence[LayerSpec],
    keys: Packing,
    values: Packing | None = None,
    holds: Holds = Holds.ALL,
) -> GroupSpec:
    packing = LayerPacking(keys, values or keys)
    window = 1 if holds is Holds.OPEN else layers[0].window
    made = [packed_tensors(layer, side, dim, packing.side(side)) for layer in layers for side, dim in sides(layer)]
    tensors = tuple(side[part] for part in PARTS for side in made if part in side)
    tensors = tuple(sorted(tensors, key=lambda tensor: -tensor.numpy_dtype.itemsize))
    return GroupSpec(name, tensors, window, tuple(layers), keys, None if packing.values == keys else values, holds)


def make_groups(layers: Sequence[LayerSpec], packings: Packing | Sequence[LayerPacking]) -> tuple[GroupSpec, ...]:
    """Split layers by depth (quarters; halves under 8 layers), window and packing; open blocks apart."""
    if isinstance(packings, Packing):
        packings = [LayerPacking(packings, packings)] * len(layers)
    num_spans = 2 if len(layers) < 8 else 4
    usual = max(packings, key=packings.count, default=None)
    groups: dict[tuple[str, LayerPacking], list[LayerSpec]] = {}
    for position, (layer, packing) in enumerate(zip(layers, packings, strict=True)):
        kind = "full" if layer.window is None else f"window{layer.window}"
        span = position * num_spans // len(layers)
        name = f"{kind}.{span}" if packing == usual else f"{kind}.{span}.{packing.bits}"
        groups.setdefault((name, packing), []).append(layer)
    return tuple(made for (name, packing), members in groups.items() for made in _groups_of(name, members, packing))


def _groups_of(name: str, layers: Sequence[LayerSpec], packing: LayerPacking) -> Iterator[GroupSpec]:
    unfinished = packing.while_open
    if unfinished is None:
        yield attention_group(name, layers, packing.keys, packing.values)
        return
    yield attention_group(name, layers, packing.keys, packing.values, Holds.FULL)
    yield attention_group(f"{name}.open", layers, unfinished.keys, unfinished.values, Holds.OPEN)
