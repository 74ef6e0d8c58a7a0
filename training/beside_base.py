"""What adapters read while they are trained: keys and values of their own, or base's with what they add to them.

The second is how residual sharing serves them. What base's weights make of an adapter's own input is computed here as
mlx-lm's Qwen3 does; how far it is from what they make of base's is the divergence that a server's guard reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from training.model import RoundedCache, rounded


@dataclass(frozen=True)
class KeysValues:
    """Of one layer, [B, H_kv, n, D], keys normed and turned."""

    keys: mx.array
    values: mx.array


@dataclass(frozen=True)
class BasePass:
    """What the frozen base makes of some tokens.

    Args:
        inputs: hidden states in front of each layer, [B, n, hidden]; behind the last one, too.
        layers: keys and values of each layer, before they are rounded.
    """

    inputs: Sequence[mx.array]
    layers: Sequence[KeysValues]


class _Kept(RoundedCache):
    """Keeps what it was given."""

    given: KeysValues

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.given = KeysValues(keys, values)
        return super().update_and_fetch(keys, values)


class BesideBase:
    """A cache that gives back base's keys and values, rounded, with what an adapter adds to its own.

    Args:
        base: of the same tokens.
        plain: what base's weights make of the adapter's input.
    """

    offset = 0

    def __init__(self, base: KeysValues, plain: KeysValues) -> None:
        self._base, self._plain = base, plain

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return (
            rounded(self._base.keys) + (keys - self._plain.keys),
            rounded(self._base.values) + (values - self._plain.values),
        )


def base_pass(layers: Sequence[nn.Module], embedded: mx.array) -> BasePass:
    """Run these layers, the first ones of a model, on [B, n, hidden]."""
    caches = [_Kept() for _ in layers]
    inputs = [embedded]
    for layer, cache in zip(layers, caches, strict=True):
        inputs.append(layer(inputs[-1], "causal", cache))
    return BasePass(inputs, [cache.given for cache in caches])


def plain_keys_values(layer: Any, hidden: mx.array) -> KeysValues:
    """What base's weights make of what comes into a layer, whoever else acts on its modules."""
    attention, x = layer.self_attn, layer.input_layernorm(hidden)
    keys, values = (
        _original(projection)(x).reshape(*x.shape[:2], attention.n_kv_heads, -1)
        for projection in (attention.k_proj, attention.v_proj)
    )
    return KeysValues(attention.rope(attention.k_norm(keys).swapaxes(1, 2)), values.swapaxes(1, 2))


def _original(linear: Any) -> Any:
    return linear.original if "original" in linear else linear


def squared_divergence(plain: Sequence[KeysValues], base: Sequence[KeysValues], weights: mx.array) -> mx.array:
    """Of the last layers' keys and values from base's, relative to all of base's, as `models/divergence.py` has it.

    Args:
        plain: of as many last layers as it has.
        base: of all layers.
        weights: of tokens, [B, n].
    """

    def energy(x: mx.array) -> mx.array:
        return (mx.square(x).sum(axis=(1, 3)) * weights).sum()

    last = base[len(base) - len(plain) :]
    apart = [
        sum((energy(getattr(mine, side) - getattr(theirs, side)) for mine, theirs in zip(plain, last, strict=True)), 0)
        / sum((energy(getattr(each, side)) for each in base), 0)
        for side in ("keys", "values")
    ]
    return sum(apart, mx.array(0.0)) / 2
