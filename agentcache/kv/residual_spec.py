"""The cache of one adapter's residuals (ForkKV, arXiv 2604.06370): what an adapter adds to the keys and values of base;
or of those of a family of adapters with the same As (LRAgent, arXiv 2602.01053).

Of a token, layer and side it keeps x·A, the low-rank half of x·A·B: float16, one copy for all heads, without rope.
Where the model norms each head's keys, it also keeps the factors of that norm, of the key without and with the adapter.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentcache.kv.spec import POSITION, CacheSpec, GroupSpec, TensorSpec

DTYPE = "F16"


@dataclass(frozen=True)
class ResidualLayer:
    """What an adapter adds to one layer's keys and values.

    Args:
        index: the layer, as in `LayerSpec`.
        key_rank, value_rank: of x·A; 0 where the adapter does not touch that side.
        normed: the model norms each head's keys.
    """

    index: int
    key_rank: int
    value_rank: int
    normed: bool


@dataclass(frozen=True)
class ResidualShape:
    """What an adapter adds to a model's cache.

    Args:
        layers: those whose keys or values it touches, in order of depth; at least one.
        dtype: that the model computes in, as MLX names it.
        is_family: it is kept once for all adapters that have these As, and x is base's, so that it is nobody's own.
    """

    layers: tuple[ResidualLayer, ...]
    dtype: str
    is_family: bool = False


def key_a_name(layer: int) -> str:
    """x·A of a layer's keys: float16 [tokens, rank]."""
    return f"residual.layers.{layer}.key_a.{POSITION}"


def value_a_name(layer: int) -> str:
    """x·A of a layer's values: float16 [tokens, rank]."""
    return f"residual.layers.{layer}.value_a.{POSITION}"


def key_norms_name(layer: int) -> str:
    """1 / rms of a layer's keys before their norm, without and with the adapter: float16 [tokens, H_kv, 2].

    A family's: [tokens, H_kv, 1], without an adapter; with one, each member works it out when it reads.
    """
    return f"residual.layers.{layer}.key_norms.{POSITION}"


def residual_spec(base: CacheSpec, shape: ResidualShape) -> CacheSpec:
    """The spec of the cache that is kept beside `base`: groups named and windowed as base's, those with tensors only.

    Its digest covers base's spec, the dtype that x was computed in, and whose x it is.
    """
    touched = {layer.index: layer for layer in shape.layers}
    groups = []
    for group in base.groups:
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
