"""The shape of a model's cache, as data.

The spec is part of every key and every file: another number of bits, another grouping or another rope is another cache.
"""

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
from agentcache.errors import BrokenInvariant
from agentcache.kv.packing import PARTS, LayerPacking, Packing

POSITION = "@"
# As safetensors names them.
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # numpy has none; its bits
    "U8": np.dtype("u1"),
}
# Of recurrent state, as MLX names them and as safetensors does.
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
    """What one layer caches per token.

    Args:
        index: the layer's position in order of computation: how many layers are computed before it. (A model may run
            through its layers twice; then the second round goes on counting.)
        num_kv_heads: heads that are cached (1 for MLA's latent).
        key_dim: values per head in the key cache.
        value_dim: values per head in the value cache; 0 where values are read from the key cache (MLA).
        window: number of most recent tokens attended to; None for all.
        nth: which of the layer's caches it is, where a layer has several.
    """

    index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    nth: int = 0


@dataclass(frozen=True)
class StateTensor:
    """One array of a recurrent layer's state, as one row has it.

    Args:
        shape: without the batch axis.
        dtype: as MLX names it, such as `float32`.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RecurrentSpec:
    """What one recurrent layer (Mamba, gated delta, a short convolution) keeps, however many tokens it has read.

    Args:
        index: the layer's position in the order of computation, as in `LayerSpec`.
        tensors: of its state, in the order of mlx-lm's `ArraysCache`; None for an entry that the model never fills.
    """

    index: int
    tensors: tuple[StateTensor | None, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a group's blocks, as data: all that arenas and files know of it.

    Args:
        name: its name in files, where `POSITION` stands for the block's number in its sequence.
        dtype: one of `DTYPES`.
        shape: of one token; of the whole block where `token_axis` is None.
        token_axis: the axis that a block's tokens make beside those of `shape`; None for a tensor that is there once a
            block, however many tokens the block has.
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
        """Bytes of one token or, where `token_axis` is None, of the block."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes in a slot, which has room for a full block."""
        return self.own_bytes if self.token_axis is None else self.own_bytes * BLOCK_SIZE

    @cached_property
    def num_runs(self) -> int:
        """Into how many pieces the bytes of a block that is not full fall in its slot."""
        return math.prod(self.shape[: self.token_axis or 0])

    def block_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Its shape in a block of so many tokens."""
        if self.token_axis is None:
            return self.shape
        return self.shape[: self.token_axis] + (num_tokens,) + self.shape[self.token_axis :]


@dataclass(frozen=True)
class GroupSpec:
    """What is cached in blocks of its own: usually for the layers of one attention kind in one span of depth.

    Args:
        name: unique in its `CacheSpec`; addresses and files name the group by it.
        tensors: of a block, in the order of its bytes; wide dtypes first, so that all are aligned.
        window: number of most recent tokens that are read; None for all.
        layers: the attention layers whose keys and values these are; none in a group of other tensors.
        quantisation: how keys are kept, and values where it is not said of them; None in a group of other tensors.
        value_quantisation: how values are kept where that is another way.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    window: int | None = None
    layers: tuple[LayerSpec, ...] = ()
    quantisation: Packing | None = None
    value_quantisation: Packing | None = None

    def __post_init__(self) -> None:
        sizes = [tensor.numpy_dtype.itemsize for tensor in self.tensors]
        if sizes != sorted(sizes, reverse=True):
            raise BrokenInvariant(f"the tensors of group {self.name} do not begin with the widest dtypes")
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise BrokenInvariant(f"two tensors of group {self.name} have one name")

    # What is known of blocks is looked up by their group, for every file: nothing that takes long to compare.
    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, GroupSpec) and self._text == other._text)

    def __hash__(self) -> int:
        return hash(self._text)

    @cached_property
    def _text(self) -> str:
        """All of its fields."""
        return repr(self)

    @cached_property
    def packing(self) -> LayerPacking | None:
        """How its layers' keys and values are kept; None in a group of other tensors."""
        if self.quantisation is None:
            return None
        return LayerPacking(self.quantisation, self.value_quantisation or self.quantisation)

    @property
    def is_state(self) -> bool:
        """Whether its blocks are snapshots of recurrent state: what layers keep of all tokens up to a block's end."""
        return self.name == STATE_GROUP

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes that each token adds to a block."""
        return sum(tensor.own_bytes for tensor in self.tensors if tensor.token_axis is not None)

    def bytes_of(self, num_tokens: int) -> int:
        """Bytes of a block of so many tokens."""
        return self._bytes_once + num_tokens * self.bytes_per_token

    def tokens_in(self, num_bytes: int) -> int:
        """The tokens of a block that has so many bytes; those of a full one where tokens do not matter."""
        return (num_bytes - self._bytes_once) // self.bytes_per_token if self.bytes_per_token else BLOCK_SIZE

    @cached_property
    def _bytes_once(self) -> int:
        return sum(tensor.own_bytes for tensor in self.tensors if tensor.token_axis is None)

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of a full block."""
        return self.bytes_of(BLOCK_SIZE)

    def first_block_needed(self, num_tokens: int) -> int:
        """Index of the first block that the token at position `num_tokens` still attends to."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // BLOCK_SIZE


@dataclass(frozen=True)
class CacheSpec:
    """A cache: all that a model keeps, or what is kept beside that, with blocks and addresses of its own.

    Args:
        model_type: mlx-lm's name of the architecture.
        num_attention_heads: query heads, for the file header.
        groups: the cache groups, in order of depth.
        rope: a text that changes whenever rope would rotate differently.
        recurrent: one per layer that keeps a state instead, or besides, in order of depth.
        beside: of a cache that is kept beside the model's own, what it goes with: that one's digest among it.
        rank: of a cache that holds the heads of one of several processes, which of how many; empty alone.
        sources: digest of the code that computes the model's keys and values (`models/source_digest.py`).
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

    def __eq__(self, other: object) -> bool:  # as of `GroupSpec`
        return self is other or (isinstance(other, CacheSpec) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """Digest of everything above; part of every key."""
        fields = asdict(self, dict_factory=_without_new_defaults)
        return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def by_rank(self) -> tuple[CacheSpec, ...]:
        """What each rank of this one's world caches; this one alone where a process has all heads."""
        if not self.rank:
            return (self,)
        size = int(self.rank.rpartition(" ")[2])
        return tuple(replace(self, rank=f"{rank} of {size}") for rank in range(size))

    @cached_property
    def state_group(self) -> GroupSpec | None:
        """The group of snapshots of recurrent state, a block each; None for a model without recurrent layers."""
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
        """The cache groups, and behind them the state's."""
        return self.groups if self.state_group is None else (*self.groups, self.state_group)

    @property
    def num_layers(self) -> int:
        """Layers whose keys and values it holds."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @cached_property
    def bits(self) -> float | None:
        """Of a key or value, the mean where they differ; None where none are kept."""
        kept = [
            (layer.num_kv_heads * dim, group.packing.side(side).bits)
            for group in self.groups
            if group.packing is not None
            for layer in group.layers
            for side, dim in sides(layer)
        ]
        if not kept:
            return None
        mean = sum(size * bits for size, bits in kept) / sum(size for size, _ in kept)
        return int(mean) if mean.is_integer() else round(mean, 2)

    def group(self, name: str) -> GroupSpec:
        """The group of that name; KeyError if there is none."""
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
)


def _without_new_defaults(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    """Entries that came later are left out where they say nothing: files that there are keep their addresses."""
    return {name: value for name, value in entries if (name, value) not in _NEW_DEFAULTS}


def tensor_name(layer: LayerSpec, side: str, part: str) -> str:
    """Name in files of one of `PARTS` of a layer's `key_cache` or `value_cache`."""
    owner = f"{layer.index}.{layer.nth}" if layer.nth else str(layer.index)
    return f"cache.layers.{owner}.{side}.{POSITION}.{part}"


def state_name(cache: int, number: int) -> str:
    """Name in files of array `number` of a recurrent layer's state; `cache` counts these layers in order of depth."""
    return f"cache.recurrent.{cache}.{number}"


def sides(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    """(name in files, dimension) of what a layer caches. One without values of its own (MLA) has a key cache only."""
    yield "key_cache", layer.key_dim
    if layer.value_dim:
        yield "value_cache", layer.value_dim


def packed_tensors(layer: LayerSpec, side: str, dim: int, packing: Packing) -> dict[str, TensorSpec]:
    """By part, in blocks of k tokens.

    Quantised: data uint32 [H_kv, k, D * bits / 32], scales, biases float16 [H_kv, k, D / group_size]; else data
    [H_kv, k, D] in 16 bits.
    """
    return {
        part: TensorSpec(tensor_name(layer, side, part), dtype, (layer.num_kv_heads, width), token_axis=1)
        for part, (dtype, width) in packing.parts(dim).items()
    }


def attention_group(name: str, layers: Sequence[LayerSpec], keys: Packing, values: Packing | None = None) -> GroupSpec:
    """The group of these layers' keys and values; values are kept as keys are, unless it is said."""
    packing = LayerPacking(keys, values or keys)
    made = [packed_tensors(layer, side, dim, packing.side(side)) for layer in layers for side, dim in sides(layer)]
    tensors = tuple(side[part] for part in PARTS for side in made if part in side)
    # The widest dtypes first, so that all are aligned.
    tensors = tuple(sorted(tensors, key=lambda tensor: -tensor.numpy_dtype.itemsize))
    return GroupSpec(name, tensors, layers[0].window, tuple(layers), keys, None if packing.values == keys else values)


def make_groups(layers: Sequence[LayerSpec], packings: Packing | Sequence[LayerPacking]) -> tuple[GroupSpec, ...]:
    """Cut `layers` into spans of depth (quarters; halves under 8 layers), each by attention window and by packing.

    Args:
        packings: of all layers' keys and values, or each layer's.
    """
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
    return tuple(
        attention_group(name, members, packing.keys, packing.values) for (name, packing), members in groups.items()
    )
