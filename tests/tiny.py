"""Tiny models with random weights: folders that `mlx_lm.load` takes like any other.

Nothing in them is one, zero or tied by accident: norms, biases and attention sinks are random, so that a forward pass
that forgets one of them gives other logits. Embeddings are small beside what the layers add, so greedy text depends
on context and not on the last token only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from tests.reply_formats import WRITERS
from tests.tokenizers_factory import byte_bpe, byte_bpe_bos, metaspace

TOKENIZERS: dict[str, Callable[[Path], Any]] = {
    "byte_bpe": byte_bpe,
    "byte_bpe_bos": byte_bpe_bos,
    "metaspace": metaspace,
    **WRITERS,
}

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 8,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 48,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 32,
    "sliding_window_pattern": 6,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_DEEPSEEK = {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}

# What each architecture adds to the common config. Some are variants of one mlx-lm model.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 64, "rope_scaling": _LLAMA3_ROPE},
    "llama_bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_traditional": True},
    "mistral": {"model_type": "mistral", "head_dim": 64, "sliding_window": None},
    "mistral_sliding": {
        "model_type": "mistral",
        "head_dim": 64,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "num_hidden_layers": 8, "hidden_size": 64},
    "qwen3_tied": {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 64, **_MOE},
    "gemma3_text": _GEMMA,
    "gemma3_text_wide": {**_GEMMA, "sliding_window": 512},
    "gemma3": {**_GEMMA, "model_type": "gemma3"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "rope_theta": 150000,
        "rope_scaling": _YARN,
    },
    "phi3": {"model_type": "phi3"},
    "phi3_partial": {"model_type": "phi3", "hidden_size": 256, "partial_rotary_factor": 0.5},
    "granite": {
        "model_type": "granite",
        "attention_bias": False,
        "mlp_bias": False,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
    },
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v2_q_lora": {**_DEEPSEEK, "q_lora_rank": 48, "attention_bias": True},
}

# Another config for code that one of the others runs, too: what goes on above the model is tested with them in the
# long tests, and that they are computed as mlx-lm does (models/test_hosting.py), always.
VARIANTS = ("llama_bias", "mistral", "qwen3_tied", "gemma3_text_wide", "gemma3", "phi3", "deepseek_v2_q_lora")
VARIANTS_SLOW = [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in ARCHITECTURES]

# Of those, what stands for the others where only the cache is tested: whole keys, windows beside them, sinks, latents.
CACHES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v2")
OTHER_CACHES_SLOW = [name if name in CACHES else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]

_MODULES = {"mistral": "llama"}


def tiny_model(folder: Path, architecture: str, tokenizer: str = "byte_bpe", seed: int = 0, **overrides: Any) -> Path:
    """Write a model folder and return it.

    Args:
        folder: created if it is not there.
        architecture: a name in `ARCHITECTURES`.
        tokenizer: a name in `TOKENIZERS`.
        seed: of the weights.
        overrides: entries of config.json, such as `sliding_window=512` or `num_hidden_layers=2`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    TOKENIZERS[tokenizer](folder)
    config = _nest_text_config(COMMON | ARCHITECTURES[architecture] | _token_config(folder) | overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_random_weights(config, seed), folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def fewer_layers(architecture: str) -> dict[str, Any]:
    """Overrides by which it has two spans of layers instead of four, where all are of one kind."""
    return {"num_hidden_layers": 2} if architecture == "qwen3" else {}


def _token_config(folder: Path) -> dict[str, Any]:
    """The config entries that depend on the tokenizer."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = json.loads((folder / "tokenizer_config.json").read_text())
    ids = dict(tokenizer["model"]["vocab"])
    ids.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    eos = ids[_content(names["eos_token"])]
    config = {"vocab_size": max(ids.values()) + 1, "eos_token_id": eos, "pad_token_id": eos}
    if names.get("bos_token"):
        config["bos_token_id"] = ids[_content(names["bos_token"])]
    return config


def _nest_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3 models that also see images keep everything about text one level down."""
    if config["model_type"] != "gemma3":
        return config
    outer = {name: config[name] for name in ("model_type", "vocab_size", "eos_token_id", "torch_dtype")}
    return outer | {"text_config": config | {"model_type": "gemma3_text"}}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """A random array for every parameter of mlx-lm's model, drawn in the order of their names."""
    model_type = config["model_type"]
    module = import_module(f"mlx_lm.models.{_MODULES.get(model_type, model_type)}")
    model = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    shapes = sorted(
        (name, value.shape) for name, value in tree_flatten(model.parameters()) if isinstance(value, mx.array)
    )
    return {name: _draw(rng, name, shape, model_type).astype(np.float32) for name, shape in shapes}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], model_type: str) -> np.ndarray:
    noise = rng.standard_normal(shape)
    owner, _, kind = name.rpartition(".")
    if owner.endswith("norm"):
        centre = 0.0 if model_type.startswith("gemma3") else 1.0  # Gemma stores weight - 1
        return centre + 0.3 * noise
    if kind == "sinks":
        return 1.0 + noise
    if kind == "bias":
        return 0.3 * noise
    if owner.endswith("embed_tokens"):
        return 0.1 * noise
    return noise * _gain(owner) / np.sqrt(shape[-1])


def _gain(owner: str) -> float:
    """Sharper attention than plain 1/sqrt(fan in), so that far tokens matter."""
    if owner.endswith(("q_proj", "k_proj", "q_b_proj")):
        return 1.5
    return 1.0
