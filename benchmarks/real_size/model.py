"""Models of random weights in the shape of real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from agentcache.models.builtin.embedded import TEXT_FILES, embedded_config, embedded_file

# Qwen3-8B; the embedded tokenizer uses only the first ids.
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
}


def make_model(folder: Path, shape: dict[str, Any], bits: int) -> None:
    """Write a random Qwen3 with the embedded model's tokenizer.

    A CPU gets float32, because it emulates bfloat16 slowly. The model generates only whole words, because servers send
    a token when it has text.
    """
    config = embedded_config() | shape
    if bits < 16:
        config["quantization"] = {"group_size": 64, "bits": bits}
    from mlx_lm.models.qwen3 import Model, ModelArgs

    model = Model(ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32)
    mx.random.seed(1)
    weights = {
        name: mx.random.normal(x.shape, x.dtype, scale=x.shape[-1] ** -0.5) if x.ndim > 1 else mx.ones_like(x)
        for name, x in tree_flatten(model.parameters())
    }
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    weights[head] *= _is_word(config["vocab_size"]).astype(weights[head].dtype)[:, None]
    model.load_weights(list(weights.items()))
    if bits < 16:
        nn.quantize(model, 64, bits)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in TEXT_FILES:
        (folder / name).write_bytes(embedded_file(name))


def _is_word(vocab_size: int) -> mx.array:
    """1 for each word with a leading space, else 0."""
    vocabulary = json.loads(embedded_file("tokenizer.json"))["model"]["vocab"]
    words = [number for token, number in vocabulary.items() if token[:1] == "Ġ" and token[1:].isalpha()]
    return mx.zeros(vocab_size).at[mx.array(words)].add(1.0)
