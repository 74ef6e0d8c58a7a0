"""Copies of a model that compute the same function but have keys that are hard to quantise.

Real models have outlier channels and large key biases (Qwen2.5 has both). Both can be added exactly: a RoPE pair of key
channels is scaled, and queries inversely; a constant is added to all keys of a head after RoPE, since softmax ignores a
shift of all scores.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from agentcache.errors import UnsupportedModel
from agentcache.models.layers import Stand
from agentcache.models.loader import read_model

FACTOR, BIAS = 30.0, 40.0
_PAIRS = 2  # per layer
_NORMS, _PROJECTIONS = ("q_norm", "k_norm"), ("q_proj", "k_proj")


def add_outliers(model: nn.Module, factor: float = FACTOR, seed: int = 0) -> None:
    """Scale some key channels of each layer. Raises UnsupportedModel if this may not be exact."""
    random = Random(seed)
    for attention in _attentions(model):
        dims = _rope_dims(attention)
        pairs = random.sample(range(dims // 2), _PAIRS)
        channels = [channel for pair in pairs for channel in _turned_together(attention, pair, dims)]
        _scale(attention, channels, factor)
    mx.eval(model.parameters())


def add_key_biases(model: nn.Module, bias: float = BIAS, seed: int = 0) -> None:
    """Add a constant to each layer's keys after RoPE, large in one channel per head."""
    for index, attention in enumerate(_attentions(model)):
        keys = mx.random.split(mx.random.key(1000 * seed + index))
        heads, dims = attention.n_kv_heads, _rope_dims(attention)
        if heads == attention.n_heads:
            raise UnsupportedModel("keys are told from queries by their number of heads, and these are as many")
        added = mx.random.normal((heads, 1, dims), key=keys[0])
        spike = mx.random.randint(0, dims, (heads, 1, 1), key=keys[1]) == mx.arange(dims)
        attention.rope = _BiasedRope(attention.rope, mx.where(spike, bias, added))


def write_outlier_copy(source: Path, target: Path, factor: float = FACTOR) -> Path:
    """Write a copy with outlier channels, without biases, which a model folder cannot express; return `target`."""
    read = read_model(str(source))
    read.evaluate()
    add_outliers(read.model, factor)
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model"):
            shutil.copy(file, target / file.name)
    mx.save_safetensors(
        str(target / "model.safetensors"), dict(tree_flatten(read.model.parameters())), {"format": "mlx"}
    )
    return target


class _BiasedRope(Stand):
    """RoPE that adds `bias` [H_kv, 1, D] to keys, which it recognises by their number of heads."""

    def __init__(self, original: nn.Module, bias: mx.array) -> None:
        super().__init__(original)
        self._bias = bias

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        turned: mx.array = self.original(x, *args, **kwargs)
        return turned + self._bias.astype(turned.dtype) if x.shape[1] == self._bias.shape[0] else turned


def _attentions(model: nn.Module) -> list[Any]:
    found = [getattr(layer, "self_attn", None) for layer in model.layers]
    if not all(each is not None and all(part in each for part in (*_PROJECTIONS, "rope")) for each in found):
        raise UnsupportedModel(f"outliers are known how to be put into models of Llama's form, not {type(model)}")
    return found


def _rope_dims(attention: Any) -> int:
    head_dim = attention.k_proj.weight.shape[0] // attention.n_kv_heads
    dims = int(getattr(attention.rope, "dims", head_dim))
    if dims != head_dim:
        raise UnsupportedModel("rope turns only a part of each head")
    return dims


def _turned_together(attention: Any, pair: int, dims: int) -> tuple[int, int]:
    return (2 * pair, 2 * pair + 1) if getattr(attention.rope, "traditional", False) else (pair, pair + dims // 2)


def _scale(attention: Any, channels: Sequence[int], factor: float) -> None:
    for (norm, projection), by in zip(zip(_NORMS, _PROJECTIONS, strict=True), (1 / factor, factor), strict=True):
        if norm in attention:  # follows the projection; one gain per channel for all heads
            weight = attention[norm].weight
            attention[norm].weight = weight * _factors(weight.shape[0], channels, by).astype(weight.dtype)
            continue
        linear = attention[projection]
        heads = attention.n_heads if projection == "q_proj" else attention.n_kv_heads
        own = mx.tile(_factors(linear.weight.shape[0] // heads, channels, by), heads)
        # Scaling a quantised row scales its scales and biases.
        for name in ("scales", "biases") if "scales" in linear else ("weight",):
            linear[name] = linear[name] * own[:, None].astype(linear[name].dtype)
        if "bias" in linear:
            linear["bias"] = linear["bias"] * own.astype(linear["bias"].dtype)


def _factors(dim: int, channels: Sequence[int], by: float) -> mx.array:
    chosen = (mx.arange(dim)[:, None] == mx.array(list(channels))).any(axis=1)
    return mx.where(chosen, by, 1.0)
