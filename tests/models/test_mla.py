"""Latent attention, in both forms that mlx-lm has, over a cached latent."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from agentcache.models import attention as attention_module
from agentcache.models import loader, mla
from agentcache.models.attachment import host
from tests.conftest import ModelFolder
from tests.marks import slow
from tests.models import zoo
from tests.models.driver import Driver, random_ids
from tests.models.model_files import MODEL_FILES


@pytest.mark.parametrize(("rank", "rope", "group_size"), [(64, 32, 32), (128, 64, 64)])
def test_a_token_costs_the_latent_and_its_rope_part(
    model_folder: ModelFolder, rank: int, rope: int, group_size: int
) -> None:
    loaded = loader.load(str(model_folder("deepseek_v2", kv_lora_rank=rank, qk_rope_head_dim=rope)), kv="4t")
    values = 4 * (rank + rope)
    assert loaded.spec.bytes_per_token == values // 2 + values // group_size * 4
    driver = Driver(loaded)
    driver.logits(random_ids(loaded, 300), [300])
    sides = [side for arena in driver.runner.base.groups for layer in arena.layers for side in layer.sides]
    assert [(name, side.num_heads, side.dim) for name, side in sides] == [("key_cache", 1, rank + rope)] * 4
    held = sum(tensor.array.nbytes for arena in driver.runner.base.groups for tensor in arena.tensors)
    assert held == driver.pools[0].capacity * 256 * loaded.spec.bytes_per_token


ARCHITECTURES = ["youtu_llm", "deepseek_v3", "mistral4"]  # DeepSeek-V2's form, and two of the other


@pytest.mark.parametrize("name", [*ARCHITECTURES[:2], slow(ARCHITECTURES[2])])
def test_absorbed_and_decompressed_agree(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loaded, outputs = zoo.load(name, MODEL_FILES[name].config), []
    ids = np.random.default_rng(0).integers(0, 200, 300)
    for most in (0, 1000):  # all queries decompress, all are absorbed
        monkeypatch.setattr(attention_module, "MAX_PACKED_QUERIES", most)
        outputs.append(Driver(loaded).logits(ids, [290, 10]))
    error = mx.abs(outputs[0] - outputs[1]).mean(axis=1) / mx.abs(outputs[0]).max()
    assert mx.median(error).item() < 1e-3


@pytest.mark.slow
def test_what_is_cached_is_the_latent() -> None:
    for name in ARCHITECTURES:
        loaded = zoo.load(name, MODEL_FILES[name].config)
        config = MODEL_FILES[name].config
        size = config["kv_lora_rank"] + config.get("qk_rope_head_dim", 64)
        layers = [layer for group in loaded.spec.groups for layer in group.layers]
        assert {(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in layers} == {(1, size, 0)}


def test_arrays_are_computed_as_before() -> None:
    """An adapted module is mlx-lm's own where its cache is."""
    for name in ARCHITECTURES:
        adapted, untouched = (zoo.build(name, MODEL_FILES[name].config) for _ in range(2))
        host(adapted, name, MODEL_FILES[name].config, check=False)
        caches = [make_prompt_cache(untouched), make_prompt_cache(untouched)]
        for count in (7, 1):
            ids = mx.arange(count)[None]
            assert mx.array_equal(adapted(ids, cache=caches[0]), untouched(ids, cache=caches[1]))


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_dense_weight_unpacks_quantised_linears(mode: str) -> None:
    linear = nn.Linear(64, 32, bias=False)
    linear.weight = mx.random.normal((32, 64), key=mx.random.key(0))
    assert mx.array_equal(mla.dense_weight(linear), linear.weight)
    quantised = linear.to_quantized(group_size=32, bits=4, mode=mode)
    x = mx.random.normal((5, 64), key=mx.random.key(1))
    assert mx.allclose(quantised(x), x @ mla.dense_weight(quantised).T, rtol=1e-3, atol=1e-3).item()


def test_other_attention_is_not_latent(model_folder: ModelFolder) -> None:
    model, _ = load_model(model_folder("llama"))
    assert not mla.is_expanded(model.layers[0].self_attn) and not mla.is_absorbed(model.layers[0].self_attn)
