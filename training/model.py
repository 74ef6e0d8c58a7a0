"""The model in training: mlx-lm's Qwen3 with KV rounded to 4 bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.qwen3 import Model, ModelArgs

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 416,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 32768,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "eos_token_id": 2047,
    "pad_token_id": 2045,
    "torch_dtype": "float32",
}


class RoundedCache:
    """A stateless cache that rounds KV; gradients bypass that (Bengio et al. 2013)."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return rounded(keys), rounded(values)


def rounded(x: mx.array) -> mx.array:
    there_and_back = mx.dequantize(*mx.quantize(x, group_size=64, bits=4), group_size=64, bits=4)
    return x + mx.stop_gradient(there_and_back.astype(x.dtype) - x)


def new_model(config: dict[str, Any], seed: int) -> Model:
    """Return a new float32 model, residual projections scaled by depth as in GPT-2."""
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(config))
    quiet = (2 * config["num_hidden_layers"]) ** -0.5
    for layer in model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight = projection.weight * quiet
    mx.eval(model.parameters())
    return model


def forward(model: Model, parameters: dict[str, Any], token_ids: mx.array, dtype: mx.Dtype, rounded: bool) -> mx.array:
    """Return float32 logits [rows, length, vocab], computed in `dtype`."""
    model.update(tree_map(lambda parameter: parameter.astype(dtype), parameters))
    cache = [RoundedCache() for _ in model.layers] if rounded else None
    return model(token_ids, cache=cache).astype(mx.float32)


def weighted_loss(logits: mx.array, token_ids: mx.array, weights: mx.array) -> mx.array:
    """Return the weighted mean cross entropy; logits [rows, length - 1, vocab], the rest [rows, length]."""
    weights = weights[:, 1:].astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, token_ids[:, 1:], reduction="none")
    return (losses * weights).sum() / mx.maximum(weights.sum(), 1)
