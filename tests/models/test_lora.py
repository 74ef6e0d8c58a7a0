"""Adapters give mlx-lm's numbers, and those of plain matrices added to the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from agentcache.models import loader
from agentcache.models.adapters import RowAdapter, read_adapter
from agentcache.models.attachment import host
from agentcache.models.lora import ModelAdapters
from agentcache.models.step import CurrentStep
from tests.adapters_factory import ATTENTION, MLP, SCALE, Pair, make_adapter, random_matrices, write_mlx_lm, write_peft
from tests.conftest import ModelFolder
from tests.device_marks import same_steps
from tests.marks import slow
from tests.models.driver import random_ids
from tests.models.lora_driver import CHUNKS, EQUAL, VISIBLE, adapted_step, difference, put, run
from tests.models.reference import Reference
from tests.models.saved_model import quantised, save
from tests.tiny import OTHER_CACHES_SLOW


def reference_logits(reference: Reference, ids: np.ndarray) -> mx.array:
    pieces = np.split(ids, np.cumsum(CHUNKS)[:-1])
    return mx.concatenate([reference.logits(piece)[0] for piece in pieces])


def check_against_mlx_lm(model: Path, adapter: Path) -> None:
    loaded = loader.load(str(model), kv="4t")
    ids = random_ids(loaded, sum(CHUNKS))
    base = run(loaded, ids, None)
    adapted = run(loaded, ids, RowAdapter(put(loaded, adapter)))
    reference = Reference(model, loaded.spec.groups[0].quantisation)
    load_adapters(reference.model, str(adapter))
    assert difference(adapted, reference_logits(reference, ids)) < EQUAL
    assert difference(adapted, base) > VISIBLE
    assert mx.array_equal(run(loaded, ids, None), base)


@pytest.mark.parametrize("architecture", OTHER_CACHES_SLOW)
def test_logits_are_those_of_mlx_lm_with_its_adapter(
    model_folder: ModelFolder, tmp_path: Path, architecture: str
) -> None:
    model = model_folder(architecture)
    check_against_mlx_lm(model, make_adapter(tmp_path, model, rank=5))


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=same_steps if "k_proj" in name else ()) for name in (*ATTENTION[:4], *MLP[:3])]
)
def test_each_module_alone(model_folder: ModelFolder, tmp_path: Path, target: str) -> None:
    model = model_folder("llama_bias")
    check_against_mlx_lm(model, make_adapter(tmp_path, model, targets=[target], layers=[1, 2], strength=1.0))


@pytest.mark.parametrize("architecture", [slow("llama_bias"), slow("gemma3_text"), "gpt_oss", "phi3"])
def test_four_bit_base_weights(model_folder: ModelFolder, tmp_path: Path, architecture: str) -> None:
    source = model_folder(architecture)
    adapter = make_adapter(tmp_path / "adapter", source, rank=5)
    check_against_mlx_lm(quantised(source, tmp_path / "model"), adapter)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_moe", "phi3", "deepseek_v2_q_lora"])
def test_both_formats_give_the_same_logits(model_folder: ModelFolder, tmp_path: Path, architecture: str) -> None:
    model = model_folder(architecture)
    pairs = random_matrices(model)
    loaded = loader.load(str(model), kv="4t")
    ids = random_ids(loaded, 40)
    folders = write_mlx_lm(tmp_path / "a", pairs), write_peft(tmp_path / "b", pairs)
    first, second = (run(loaded, ids, RowAdapter(put(loaded, folder)), [39, 1]) for folder in folders)
    assert mx.array_equal(first, second)


def check_against_merged(model: Path, adapter: Path, added: Mapping[str, np.ndarray]) -> None:
    """Against mlx-lm's model whose weights [out, in] have had `added` added, computed in numpy."""
    loaded = loader.load(str(model), kv="4t")
    ids = random_ids(loaded, sum(CHUNKS))
    reference = Reference(model, loaded.spec.groups[0].quantisation)
    modules = dict(reference.model.named_modules())
    for name, delta in added.items():
        modules[name].weight = modules[name].weight + mx.array(delta.astype(np.float32))
    adapted = run(loaded, ids, RowAdapter(put(loaded, adapter)))
    # Other sums flip a 4-bit code now and then.
    assert difference(adapted, reference_logits(reference, ids)) < 10 * EQUAL
    assert difference(adapted, run(loaded, ids, None)) > VISIBLE


PEFT_SCALES: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({"lora_alpha": 7}, {"q_proj": 7 / 3, "up_proj": 7 / 3}),
    ({"lora_alpha": 3, "use_rslora": True}, {"q_proj": 3 / 3**0.5, "up_proj": 3 / 3**0.5}),
    ({"lora_alpha": 7, "alpha_pattern": {"up_proj": 4}}, {"q_proj": 7 / 3, "up_proj": 4 / 3}),
]


@pytest.mark.parametrize(("config", "scales"), PEFT_SCALES)
def test_the_formula_of_peft(
    model_folder: ModelFolder, tmp_path: Path, config: dict[str, Any], scales: dict[str, float]
) -> None:
    """W + alpha / r · B · A, with A [r, in] and B [out, r]."""
    model = model_folder("qwen2")
    pairs = random_matrices(model, ["self_attn.q_proj", "mlp.up_proj"], layers=[1, 3])
    added = {name: scales[name.rpartition(".")[2]] * (pair.b.T @ pair.a.T) for name, pair in pairs.items()}
    check_against_merged(model, write_peft(tmp_path, pairs, **config), added)


def test_parts_of_fused_modules(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Adapters of k, v and up on a model that has them fused with q and gate."""
    rng = np.random.default_rng(0)
    pairs, added = {}, {}
    for layer in (1, 2):
        for part, fused, start, stop in (
            ("self_attn.k_proj", "self_attn.qkv_proj", 128, 192),
            ("self_attn.v_proj", "self_attn.qkv_proj", 192, 256),
            ("mlp.up_proj", "mlp.gate_up_proj", 192, 384),
        ):
            a, b = rng.standard_normal((128, 3)) / 11, rng.standard_normal((3, stop - start)) / 3
            pairs[f"model.layers.{layer}.{part}"] = Pair(a.astype(np.float32), b.astype(np.float32))
            delta = added.setdefault(f"model.layers.{layer}.{fused}", np.zeros((384 if "mlp" in fused else 256, 128)))
            delta[start:stop] = SCALE * (a @ b).T
    check_against_merged(model_folder("phi3"), write_mlx_lm(tmp_path, pairs), added)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision(model_folder: ModelFolder, tmp_path: Path, dtype: mx.Dtype) -> None:
    source = model_folder("qwen3")
    adapter = make_adapter(tmp_path / "adapter", source, rank=5)
    loaded = loader.load(str(source), kv="4t")
    ids = random_ids(loaded, 40)
    expected = run(loaded, ids, RowAdapter(put(loaded, adapter)), [39, 1])
    half = loader.load(str(in_dtype(source, tmp_path / "model", dtype)), kv="4t")
    weights = put(half, adapter)
    assert weights.nbytes == weights.adapter.nbytes
    assert {pair.a.dtype for pair in weights.matrices.values()} == {dtype}
    assert difference(run(half, ids, RowAdapter(weights), [39, 1]), expected) < 0.2
    assert difference(run(half, ids, None, [39, 1]), expected) > 0.4


def in_dtype(source: Path, folder: Path, dtype: mx.Dtype) -> Path:
    model, config = load_model(source)
    model.set_dtype(dtype)
    return save(model, config, source, folder)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_one_module_is_mlx_lms_layer(model_folder: ModelFolder, tmp_path: Path, dtype: mx.Dtype) -> None:
    model = model_folder("llama_bias")
    folder = in_dtype(model, tmp_path / "model", dtype)
    loaded = loader.load(str(folder), kv="4t")
    pairs = random_matrices(model, ["self_attn.q_proj"], rank=5)
    weights = put(loaded, write_mlx_lm(tmp_path / "adapter", pairs))
    wrapper = loaded.model.layers[2].self_attn.q_proj
    theirs = LoRALinear.from_base(wrapper.original, r=5, scale=SCALE)
    pair = pairs["model.layers.2.self_attn.q_proj"]
    theirs.lora_a, theirs.lora_b = mx.array(pair.a), mx.array(pair.b)
    x = mx.random.normal((2, 3, 128), key=mx.random.key(0)).astype(dtype)
    with loaded.current.of(adapted_step([RowAdapter(weights)] * 2, 3)):
        ours = wrapper(x)
    assert ours.dtype == dtype
    tolerance = 1e-6 if dtype == mx.float32 else 2e-2
    assert (mx.abs(ours - theirs(x)).max() / mx.abs(ours).max()).item() < tolerance


def test_the_dtype_of_activations_stays_as_it_is(model_folder: ModelFolder, tmp_path: Path) -> None:
    """mxfp4 weights do not tell what they are computed in: matrices are bfloat16 then."""
    folder = model_folder("llama")
    model, config = load_model(folder)
    hosted = host(model, "llama", config, check=False)
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4")
    current = CurrentStep()
    adapters = ModelAdapters(model, hosted.inspection, current)
    adapter = make_adapter(tmp_path, folder, targets=["self_attn.q_proj"])
    weights = adapters.load(read_adapter(adapter, adapters.modules))
    assert {pair.a.dtype for pair in weights.matrices.values()} == {mx.bfloat16}
    wrapper = model.layers[1].self_attn.q_proj
    x = mx.random.normal((1, 2, 128), key=mx.random.key(0)).astype(mx.float16)
    with current.of(adapted_step([RowAdapter(weights)], 2)):
        assert wrapper(x).dtype == wrapper.original(x).dtype == mx.float16
        assert not mx.allclose(wrapper(x), wrapper.original(x), atol=1e-2).item()
