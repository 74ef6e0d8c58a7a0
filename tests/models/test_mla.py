"""DeepSeek-V2's attention over a cached latent."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model

from agentcache.blocks.pool import BlockPool
from agentcache.kv.arena import LayerArena
from agentcache.kv.batch_cache import BatchQuantizedKVCache
from agentcache.models import attention as attention_module
from agentcache.models import loader, mla
from agentcache.models.rehost import rehost
from tests.conftest import ModelFolder
from tests.models.driver import Driver, random_ids


@pytest.mark.parametrize(("rank", "rope", "group_size"), [(64, 32, 32), (128, 64, 64)])
def test_a_token_costs_the_latent_and_its_rope_part(
    model_folder: ModelFolder, rank: int, rope: int, group_size: int
) -> None:
    loaded = loader.load(str(model_folder("deepseek_v2", kv_lora_rank=rank, qk_rope_head_dim=rope)))
    values = 4 * (rank + rope)
    assert loaded.spec.bytes_per_token == values // 2 + values // group_size * 4
    driver = Driver(loaded)
    driver.logits(random_ids(loaded, 300), [300])
    sides = [side for arena in driver.runner.arenas for layer in arena.layers for side in layer.sides]
    assert [(name, side.num_heads, side.dim) for name, side in sides] == [("key_cache", 1, rank + rope)] * 4
    held = sum(array.nbytes for arena in driver.runner.arenas for array in arena.arrays())
    assert held == driver.pools[0].capacity * 256 * loaded.spec.bytes_per_token


def attention_of(folders: ModelFolder, architecture: str = "deepseek_v2") -> tuple[mla.LatentAttention, LayerArena]:
    model, config = load_model(folders(architecture))
    spec = rehost(model, "deepseek_v2", config, check=False)
    return model.layers[0].self_attn, LayerArena(spec.groups[0].layers[0], spec.groups[0].quantisation)


@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v2_q_lora"])
def test_absorbed_and_decompressed_agree(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    attention, arena = attention_of(model_folder, architecture)
    x = mx.random.normal((1, 300, 128), key=mx.random.key(0))
    outputs = []
    for most in (0, 1000):  # all queries decompress, all are absorbed
        monkeypatch.setattr(attention_module, "MAX_PACKED_QUERIES", most)
        cache = BatchQuantizedKVCache.empty_rows(arena, BlockPool())
        outputs.append(mx.concatenate([attention(x[:, :290], None, cache), attention(x[:, 290:], None, cache)], axis=1))
    np.testing.assert_allclose(*map(np.array, outputs), rtol=1e-3, atol=1e-4)


def test_rows_of_a_batch_are_what_they_are_alone(model_folder: ModelFolder) -> None:
    attention, arena = attention_of(model_folder)
    pool = BlockPool()
    x = mx.random.normal((3, 300, 128), key=mx.random.key(0))
    alone, rows = [], []
    for index, length in enumerate((4, 290, 256)):
        for kept in (alone, rows):
            cache = BatchQuantizedKVCache.empty_rows(arena, pool)
            attention(x[index : index + 1, :length], None, cache)
            kept.append(cache)
    together = BatchQuantizedKVCache.merge(rows)
    for step in range(3):
        new = x[:, step * 2 : step * 2 + 2]
        out = attention(new, None, together)
        for index, cache in enumerate(alone):
            expected = attention(new[index : index + 1], None, cache)
            np.testing.assert_allclose(np.array(out[index : index + 1]), np.array(expected), rtol=1e-3, atol=1e-4)


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
    assert not mla.is_latent(model.layers[0].self_attn)
