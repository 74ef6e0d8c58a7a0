"""Layout of residual KV: what an adapter adds to base's keys and values (ForkKV, arXiv 2604.06370).

Adapters with equal As can share it, as a family (LRAgent, arXiv 2602.01053). Each token, layer and side has x·A, the
low-rank half of x·A·B: float16, one copy for all heads, before rope. For models that norm each head's keys, the norm
factors without and with the adapter are added.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentcache.kv.spec import POSITION, CacheSpec, GroupSpec, TensorSpec

DTYPE = "F16"


@dataclass(frozen=True)
class ResidualLayer:
    """Residual KV of one layer.

    Args:
        key_rank, value_rank: rank of x·A; 0 if the adapter leaves that side unchanged.
        normed: whether the model norms each head's keys.
    """

    index: int
    key_rank: int
    value_rank: int
    normed: bool


@dataclass(frozen=True)
class ResidualShape:
    """Residual KV of a model.

    Args:
        layers: in order of depth; at least one.
        dtype: the model's compute dtype, in MLX's terms.
        is_family: whether adapters with equal As share it; x is then base's.
    """

    layers: tuple[ResidualLayer, ...]
    dtype: str
    is_family: bool = False


def key_a_name(layer: int) -> str:
    """x·A of a layer's keys: float16 [tokens, rank]."""
    return f"residual.layers.{layer}.key_a.{POSITION}"


def value_a_name(layer: int) -> str:
    """Like `key_a_name`, for values."""
    return f"residual.layers.{layer}.value_a.{POSITION}"


def key_norms_name(layer: int) -> str:
    """1 / rms of a layer's keys before their norm, without and with the adapter: float16 [tokens, H_kv, 2].

    A family's: [tokens, H_kv, 1], without an adapter; members compute their own when reading.
    """
    return f"residual.layers.{layer}.key_norms.{POSITION}"


def residual_spec(base: CacheSpec, shape: ResidualShape) -> CacheSpec:
    """Return the residual spec beside `base`, with its names and windows.

    The digest covers base's spec, the dtype of x, and whether x is base's.
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
