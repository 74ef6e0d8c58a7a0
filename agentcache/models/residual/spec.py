"""Parts of an adapter that act on keys and values, and the layout of their residual KV: x·A, before rope.

Adapters with equal A matrices can share it, as a family (LRAgent, arXiv 2602.01053).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from agentcache.kv.spec import POSITION, CacheSpec, GroupSpec, TensorSpec
from agentcache.models.adapter_files import LowRank, ModuleName

DTYPE = "F16"
KEYS, VALUES = "k_proj", "v_proj"
_SPLIT = (KEYS, VALUES, "qkv_proj")


@dataclass(frozen=True)
class Side:
    """Columns of a module's output that are keys, or values; `components` of its rank act on them."""

    module: ModuleName
    begin: int
    end: int
    components: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.components)


@dataclass(frozen=True)
class AdapterSides:
    """An adapter's parts by changed layer; `unsplit` is an adapted module that makes KV in another way."""

    keys: Mapping[int, Side] = field(default_factory=dict)
    values: Mapping[int, Side] = field(default_factory=dict)
    unsplit: ModuleName | None = None


def find_side(module: ModuleName, begin: int, end: int, pair: LowRank) -> Side | None:
    """Part of `pair` (numpy) that acts on columns `begin` to `end`.

    In a fused module B decides; all zeros, as before training, act on all columns.
    """
    is_whole = begin == 0 and end == pair.b.shape[1]
    acts = np.ones(pair.rank, bool) if is_whole or not pair.b.any() else pair.b[:, begin:end].any(axis=1)
    components = np.flatnonzero(acts)
    return Side(module, begin, end, tuple(components.tolist())) if components.size else None


def is_split(name: ModuleName) -> bool:
    """Whether a module's part in KV can be kept apart from base's."""
    return name.path.rpartition(".")[2] in _SPLIT


@dataclass(frozen=True)
class ResidualLayer:
    """Residual KV of one layer: ranks of x·A, 0 for an unchanged side; keys are `normed` by head."""

    index: int
    key_rank: int
    value_rank: int
    normed: bool


@dataclass(frozen=True)
class ResidualShape:
    """Residual KV of a model computing in `dtype`, by layer, in order; a family's x is base's."""

    layers: tuple[ResidualLayer, ...]
    dtype: str
    is_family: bool = False


def key_a_name(layer: int) -> str:
    """x·A of a layer's keys: float16 [tokens, rank]."""
    return f"residual.layers.{layer}.key_a.{POSITION}"


def value_a_name(layer: int) -> str:
    return f"residual.layers.{layer}.value_a.{POSITION}"


def key_norms_name(layer: int) -> str:
    """1 / rms of keys before their norm, without and with the adapter: float16 [tokens, H_kv, 2].

    A family's are [tokens, H_kv, 1], without adapter: members compute theirs when reading.
    """
    return f"residual.layers.{layer}.key_norms.{POSITION}"


def residual_spec(base: CacheSpec, shape: ResidualShape) -> CacheSpec:
    touched = {layer.index: layer for layer in shape.layers}
    groups = []
    for group in base.lasting_groups:
        tensors = [
            tensor
            for layer in group.layers
            if layer.index in touched
            for tensor in _tensors(touched[layer.index], layer.num_kv_heads, 1 if shape.is_family else 2)
        ]
        if tensors:
            groups.append(GroupSpec(group.name, tuple(tensors), group.window))
    return CacheSpec(
        base.model_type,
        base.num_attention_heads,
        tuple(groups),
        base.rope,
        beside=f"{base.digest} {shape.dtype}" + (" x of base" if shape.is_family else ""),
    )


def _tensors(layer: ResidualLayer, num_kv_heads: int, num_norms: int) -> list[TensorSpec]:
    tensors = []
    if layer.key_rank:
        tensors.append(TensorSpec(key_a_name(layer.index), DTYPE, (layer.key_rank,)))
        if layer.normed:
            tensors.append(TensorSpec(key_norms_name(layer.index), DTYPE, (num_kv_heads, num_norms)))
    if layer.value_rank:
        tensors.append(TensorSpec(value_a_name(layer.index), DTYPE, (layer.value_rank,)))
    return tensors
