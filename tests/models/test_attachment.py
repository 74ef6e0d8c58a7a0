"""Models on the paged cache give mlx-lm's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model

from agentcache.kv.packing import LayerBits
from agentcache.models import loader
from agentcache.models.attachment import Everywhere, host
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.models.driver import Driver, chunks_of, random_ids
from tests.models.reference import Reference
from tests.models.saved_model import quantised, save
from tests.tiny import ARCHITECTURES

CHUNKS = [5, 200, 9, 60, 8, 1, 1, 20, 1]  # over a block border and many windows of 32


def compare(folder: Path, chunks: list[int]) -> float:
    """Mean difference of all logits from those of the unmodified model on the same quantised values."""
    loaded = loader.load(str(folder), kv="4t")
    ids = random_ids(loaded, sum(chunks))
    reference = Reference(folder, loaded.spec.groups[0].quantisation)
    pieces = np.split(ids, np.cumsum(chunks)[:-1])
    expected = mx.concatenate([reference.logits(piece)[0] for piece in pieces]).astype(mx.float32)
    actual = Driver(loaded).logits(ids, chunks).astype(mx.float32)
    return (mx.abs(actual - expected).mean() / mx.abs(expected).max()).item()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_original_on_quantised_values(model_folder: ModelFolder, architecture: str) -> None:
    # MLA is multiplied in another order than mlx-lm's, so that with some BLAS a few values are rounded to a neighbour.
    allowed = 2e-3 if architecture.startswith("deepseek") else 1e-4
    assert compare(model_folder(architecture), CHUNKS) < allowed


@pytest.mark.slow
def test_a_prompt_of_several_wide_windows(model_folder: ModelFolder) -> None:
    folder = model_folder("gemma3_text", sliding_window=300, num_hidden_layers=6)
    assert compare(folder, [256, 256, 250, 40, 1, 1]) < 1e-4


@pytest.mark.parametrize("architecture", [*map(slow, ["llama_bias", "gemma3_text", "gpt_oss"]), "deepseek_v2_q_lora"])
def test_four_bit_weights(model_folder: ModelFolder, tmp_path: Path, architecture: str) -> None:
    source = model_folder(architecture, q_lora_rank=64) if "q_lora" in architecture else model_folder(architecture)
    assert compare(quantised(source, tmp_path), CHUNKS) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [(name, mx.bfloat16) for name in ("qwen3", "gemma3_text", "deepseek_v2")]
    + [("qwen3", mx.float16), slow("gemma3_text", mx.float16), slow("deepseek_v2", mx.float16)],
    ids=str,
)
def test_half_precision_weights(model_folder: ModelFolder, tmp_path: Path, architecture: str, dtype: mx.Dtype) -> None:
    source = model_folder(architecture, first_k_dense_replace=9)  # mlx's CPU back end has no half precision experts
    model, config = load_model(source)
    model.set_dtype(dtype)
    assert compare(save(model, config, source, tmp_path), [5, 60, 1]) < 0.02


@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        *(slow("llama", 7), ("gemma3_text", 256), slow("deepseek_v2", 7)),
        *(slow("llama", 256), slow("gemma3_text", 7), slow("deepseek_v2", 256)),
        *(slow("llama", 300), slow("gemma3_text", 300), slow("deepseek_v2", 300)),
    ],
)
def test_chunks_change_next_to_nothing(model_folder: ModelFolder, architecture: str, size: int) -> None:
    """Sums in another order can flip the last place of a value, and so, rarely, its 4-bit code: hence a mean."""
    loaded = loader.load(str(model_folder(architecture)), kv="4t")
    ids = random_ids(loaded, 300)
    whole, chunked = (Driver(loaded).logits(ids, chunks) for chunks in (CHUNKS[:-2] + [16], chunks_of(size, 300)))
    error = mx.abs(whole - chunked).max(axis=1) / mx.abs(whole).max()
    assert mx.median(error).item() < 5e-3
    assert mx.mean(error).item() < 1e-2


@pytest.mark.parametrize("size", [1, 7, 256])
def test_chunks_of_a_single_layer_agree_throughout(model_folder: ModelFolder, size: int) -> None:
    loaded = loader.load(str(model_folder("llama", num_hidden_layers=1)), kv="4t")
    ids = random_ids(loaded, 300)
    whole, chunked = (Driver(loaded).logits(ids, chunks) for chunks in ([300], chunks_of(size, 300)))
    error = mx.abs(whole - chunked).max(axis=1) / mx.abs(whole).max()
    assert mx.sum(error < 1e-4).item() > 290


def load(folder: Path) -> tuple[nn.Module, str, dict[str, Any]]:
    model, config = load_model(folder)
    return model, config["model_type"], config


def test_windows_make_groups(model_folder: ModelFolder) -> None:
    model, name, config = load(model_folder("mistral_sliding"))
    spec = host(model, name, config).spec
    assert [group.window for group in spec.groups] == [32, None, 32, None]
    assert [layer.index for group in spec.groups for layer in group.layers] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v2", "gemma3_text"])
def test_keys_and_values_in_8_bits_are_proved_as_those_in_4_are(model_folder: ModelFolder, name: str) -> None:
    folder = model_folder(name)
    specs = [host(*load(folder), choose=Everywhere(LayerBits(bits, bits))).spec for bits in (4, 8)]
    assert [spec.bits for spec in specs] == [4, 8]
    assert specs[0].digest != specs[1].digest
    data = [[t.own_bytes for t in spec.groups[0].tensors if t.name.endswith("data")] for spec in specs]
    assert [2 * size for size in data[0]] == data[1]


@pytest.mark.slow
def test_rope_is_part_of_the_digest(model_folder: ModelFolder) -> None:
    folders = [model_folder(a, rope_theta=theta) for a in ("qwen2", "gemma3") for theta in (10000.0, 20000.0)]
    digests = [host(*load(folder)).spec.digest for folder in folders]
    assert len(set(digests)) == 4
