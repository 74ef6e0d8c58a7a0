"""A model whose weights say given texts: served unpatched, it emits any token sequence over HTTP.

It is mlx-lm's GPT-2. Attention and MLP add nothing, and position embeddings outweigh token embeddings, so the position
alone decides the next token. A prompt of n * stride tokens is answered with script n mod len(scripts).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

STRIDE = 192  # tokens
_SIZE = 64
_POSITION_SCALE = 1000.0  # of position embeddings beside token embeddings of length 1
_LOGIT_SCALE = 100.0  # so large that sampling at any usual temperature takes the script's token


def write_scripted_model(
    folder: Path,
    scripts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    num_strides: int = 64,
    stride: int = STRIDE,
    **config: Any,
) -> None:
    """Write config.json and model.safetensors; the tokenizer is the caller's.

    Args:
        scripts: token ids of each answer, each ended by the token that is to end it.
        vocab_size: of the tokenizer, added tokens included.
        num_strides: context length in strides.
        stride: tokens from where one script answers to where the next one does; no script is longer.
        config: further entries of config.json, such as `eos_token_id`.

    Raises:
        ValueError: a script is empty, too long, or has an id outside the vocabulary.
    """
    for script in scripts:
        if not 0 < len(script) <= stride or not all(0 <= token < vocab_size for token in script):
            raise ValueError(f"a script has 1 to {stride} ids below {vocab_size}")
    num_positions = num_strides * stride
    tokens = _codes(vocab_size)
    # The last token of a prompt of n strides has position n * stride - 1, and decides the answer's first token.
    nexts = np.zeros(num_positions, np.int64)
    for position in range(num_positions):
        number, index = divmod(position + 1, stride)
        script = scripts[number % len(scripts)]
        nexts[position] = script[min(index, len(script) - 1)]
    weights = {
        "model.wte.weight": tokens,
        "model.wpe.weight": _POSITION_SCALE * tokens[nexts],
        "model.ln_f.weight": np.full(_SIZE, _LOGIT_SCALE, np.float32),
        "model.ln_f.bias": np.zeros(_SIZE, np.float32),
        **_idle_layer("model.h.0"),
    }
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, folder / "model.safetensors")
    shape = {
        "model_type": "gpt2",
        "n_ctx": num_positions,
        "n_positions": num_positions,
        "max_position_embeddings": num_positions,
        "n_embd": _SIZE,
        "n_head": 1,
        "n_layer": 1,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": vocab_size,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(shape | config, indent=1))


def _codes(vocab_size: int) -> np.ndarray:
    """A vector of length 1 and mean 0 for each token, of shape (vocab_size, _SIZE); any two are far apart."""
    codes = np.random.default_rng(0).standard_normal((vocab_size, _SIZE)).astype(np.float32)
    codes -= codes.mean(axis=1, keepdims=True)
    return codes / np.linalg.norm(codes, axis=1, keepdims=True)


def _idle_layer(name: str) -> dict[str, np.ndarray]:
    """A layer with real keys and values that adds nothing to the hidden state."""
    rng = np.random.default_rng(1)
    shapes = {
        "attn.c_attn": (3 * _SIZE, _SIZE),
        "attn.c_proj": (_SIZE, _SIZE),
        "mlp.c_fc": (4 * _SIZE, _SIZE),
        "mlp.c_proj": (_SIZE, 4 * _SIZE),
    }
    weights: dict[str, np.ndarray] = {}
    for part, shape in shapes.items():
        scale = 0.0 if part.endswith("c_proj") else 0.1
        weights[f"{name}.{part}.weight"] = scale * rng.standard_normal(shape)
        weights[f"{name}.{part}.bias"] = np.zeros(shape[0])
    for part in ("ln_1", "ln_2"):
        weights[f"{name}.{part}.weight"] = np.ones(_SIZE)
        weights[f"{name}.{part}.bias"] = np.zeros(_SIZE)
    return weights
