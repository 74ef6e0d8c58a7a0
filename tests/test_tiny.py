"""The tiny models are worth testing with: they load, nothing in them is trivial, and early tokens change late ones."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from tests.conftest import ModelFolder
from tests.tiny import ARCHITECTURES, TOKENIZERS, VARIANTS_SLOW, tiny_model

PROMPT_TOKENS = 40
GENERATED_TOKENS = 16


def greedy(model: object, token_ids: list[int]) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(token_ids), model, max_tokens=GENERATED_TOKENS)]


@pytest.mark.parametrize("architecture", VARIANTS_SLOW)
def test_early_tokens_change_late_ones(model_folder: ModelFolder, architecture: str) -> None:
    model, tokenizer = mlx_lm.load(str(model_folder(architecture)))
    prompt = np.random.default_rng(0).integers(10, tokenizer.vocab_size, PROMPT_TOKENS).tolist()
    changed = [prompt[0], prompt[1] - 1, *prompt[2:]]
    first, second = greedy(model, prompt), greedy(model, changed)
    assert len(set(first)) > GENERATED_TOKENS // 4
    assert sum(a != b for a, b in zip(first, second, strict=True)) > GENERATED_TOKENS // 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_parameter_is_trivial(model_folder: ModelFolder, architecture: str) -> None:
    model, _ = mlx_lm.load(str(model_folder(architecture)))
    flat = [name for name, value in tree_flatten(model.parameters()) if mx.std(value).item() < 0.01]
    assert flat == []


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_tokenizer_fits(model_folder: ModelFolder, tokenizer: str) -> None:
    model, wrapper = mlx_lm.load(str(model_folder("llama", tokenizer)))
    assert model.args.vocab_size >= len(wrapper.get_vocab())
    assert isinstance(mlx_lm.generate(model, wrapper, "Hello", max_tokens=4), str)


def test_seed_and_overrides_matter(tmp_path: Path) -> None:
    weights = [
        tiny_model(tmp_path / str(number), "qwen3", seed=seed, num_hidden_layers=2) / "model.safetensors"
        for number, seed in enumerate((0, 0, 1))
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes() != weights[2].read_bytes()
    model, _ = mlx_lm.load(str(weights[0].parent))
    assert len(model.layers) == 2
