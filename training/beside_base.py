"""KV for training adapters: their own, or base's plus the adapter's difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from training.model import RoundedCache, rounded


@dataclass(frozen=True)
class KeysValues:
    """One layer's KV, [B, H_kv, n, D]; keys after norm and RoPE."""

    keys: mx.array
    values: mx.array


@dataclass(frozen=True)
class BasePass:
    """Base's forward pass: hidden states around each layer [B, n, hidden]; unrounded KV."""

    inputs: Sequence[mx.array]
    layers: Sequence[KeysValues]


class _Kept(RoundedCache):
    given: KeysValues

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.given = KeysValues(keys, values)
        return super().update_and_fetch(keys, values)


class BesideBase:
    """A cache of base's rounded KV plus the adapter's difference to `plain`, the KV of base's weights for its input."""

    offset = 0

    def __init__(self, base: KeysValues, plain: KeysValues) -> None:
        self._base, self._plain = base, plain

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return (
            rounded(self._base.keys) + (keys - self._plain.keys),
            rounded(self._base.values) + (values - self._plain.values),
        )


def base_pass(layers: Sequence[nn.Module], embedded: mx.array) -> BasePass:
    caches = [_Kept() for _ in layers]
    inputs = [embedded]
    for layer, cache in zip(layers, caches, strict=True):
        inputs.append(layer(inputs[-1], "causal", cache))
    return BasePass(inputs, [cache.given for cache in caches])


def plain_keys_values(layer: Any, hidden: mx.array) -> KeysValues:
    """Return KV of base's weights for a layer's input (Qwen3)."""
    attention, x = layer.self_attn, layer.input_layernorm(hidden)
    keys, values = (
        _original(projection)(x).reshape(*x.shape[:2], attention.n_kv_heads, -1)
        for projection in (attention.k_proj, attention.v_proj)
    )
    return KeysValues(attention.rope(attention.k_norm(keys).swapaxes(1, 2)), values.swapaxes(1, 2))


def _original(linear: Any) -> Any:
    return linear.original if "original" in linear else linear


def squared_divergence(plain: Sequence[KeysValues], base: Sequence[KeysValues], weights: mx.array) -> mx.array:
    """Return the last layers' squared divergence (`models/residual/arenas.py`); `weights` [B, n]."""

    def energy(x: mx.array) -> mx.array:
        return (mx.square(x).sum(axis=(1, 3)) * weights).sum()

    last = base[len(base) - len(plain) :]
    apart = [
        sum((energy(getattr(mine, side) - getattr(theirs, side)) for mine, theirs in zip(plain, last, strict=True)), 0)
        / sum((energy(getattr(each, side)) for each in base), 0)
        for side in ("keys", "values")
    ]
    return sum(apart, mx.array(0.0)) / 2
