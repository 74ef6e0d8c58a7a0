"""Models of random weights for benchmarks, with the embedded model's tokenizer: every token of a prompt counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from agentcache.models.builtin.embedded import TEXT_FILES, embedded_config, embedded_file, make_folder

_RECIPE = 2  # raise it when weights of the same config change
_SEED = 1
_NORM_SPREAD = 0.3
_EMBEDDING_SIZE = 0.1  # layers add 1.0: text depends on context
_HEAD_NORM = 1.6  # sharp attention: each token of a long context matters
_QUIET = 0.02  # embeddings of tokens to avoid


def random_model_path(home: Path, **shape: int) -> Path:
    """Folder of a model under `home`, made on first use; `shape` changes the embedded one's config. Raises OSError."""
    config = embedded_config() | shape
    folder = home / "models" / f"random-{_digest(config)[:8]}"
    if not folder.is_dir():
        files = {name: embedded_file(name) for name in TEXT_FILES}
        files["config.json"] = json.dumps(config, indent=2).encode()
        files["model.safetensors"] = save(_weights(config), metadata={"format": "mlx"})
        make_folder(folder, files)
    return folder


def _digest(config: dict[str, Any]) -> str:
    state = hashlib.blake2b(f"{_RECIPE} {_SEED} {json.dumps(config, sort_keys=True)}".encode(), digest_size=16)
    for name in TEXT_FILES:
        state.update(embedded_file(name))
    return state.hexdigest()


def _weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    bits = np.random.PCG64(_SEED)
    weights = {name: _draw(bits, name, shape) for name, shape in _shapes(config)}
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[_quiet_ids(config["vocab_size"])] *= np.float32(_QUIET)
    return weights


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (keys, hidden)
        yield prefix + "self_attn.v_proj.weight", (keys, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "self_attn.q_norm.weight", (head_dim,)
        yield prefix + "self_attn.k_norm.weight", (head_dim,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def _draw(bits: np.random.PCG64, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = _noise(bits, shape)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return np.float32(_HEAD_NORM) + np.float32(_NORM_SPREAD) * noise
    if name.endswith("norm.weight"):
        return np.float32(1) + np.float32(_NORM_SPREAD) * noise
    if name == "model.embed_tokens.weight":
        return np.float32(_EMBEDDING_SIZE) * noise
    return np.float32(shape[-1] ** -0.5) * noise


def _noise(bits: np.random.PCG64, shape: tuple[int, ...]) -> np.ndarray:
    # Uniform, of variance 1, from raw bits: numpy's distributions may change.
    raw = bits.random_raw(int(np.prod(shape))) >> np.uint64(40)
    uniform = raw.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return (uniform * np.float32(3**0.5)).reshape(shape)


def _quiet_ids(vocab_size: int) -> list[int]:
    tokenizer = json.loads(embedded_file("tokenizer.json"))
    special = {token["id"] for token in tokenizer["added_tokens"]}
    single = {index for piece, index in tokenizer["model"]["vocab"].items() if len(piece) == 1 and not piece.isascii()}
    return sorted(index for index in special | single if index < vocab_size)
