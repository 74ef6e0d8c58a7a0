"""What would give other numbers than mlx-lm is refused, by the layer's number."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cohere2, gemma4_text, jamba, mamba
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import load_model

from agentcache.errors import UnsupportedModel
from agentcache.kv.batch_cache import BatchQuantizedKVCache
from agentcache.kv.step_plan import Reads
from agentcache.models import attention
from agentcache.models.attention import Attention
from agentcache.models.mla import LatentAttention
from agentcache.models.rehost import rehost
from tests.conftest import ModelFolder

Mutation = Callable[[pytest.MonkeyPatch], None]


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    original = attention.attention_scale
    for module in ("attention", "mla"):
        patch.setattr(f"agentcache.models.{module}.attention_scale", lambda m: original(m) * 1.02)


def without_norms(patch: pytest.MonkeyPatch) -> None:
    original = Attention._split
    patch.setattr(Attention, "_split", lambda self, x, heads, norm: original(self, x, heads, "none"))


def without_query_norm(patch: pytest.MonkeyPatch) -> None:
    original = Attention._split
    patch.setattr(Attention, "_split", lambda self, x, heads, norm: original(self, x, heads, norm.replace("q_", "")))


def swapped_heads(patch: pytest.MonkeyPatch) -> None:
    original = Attention._project

    def project(self: Attention, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        queries, keys, values = original(self, x)
        return queries[:, ::-1], keys, values

    patch.setattr(Attention, "_project", project)


def rope_from_the_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchQuantizedKVCache, "offset", property(lambda self: 0))


def without_sinks(patch: pytest.MonkeyPatch) -> None:
    original = attention.AttentionOptions
    patch.setattr(attention, "AttentionOptions", lambda scale, softcap=None, sinks=None: original(scale, softcap))


def longer_window(patch: pytest.MonkeyPatch) -> None:
    original = Reads.mask.func

    def mask(reads: Reads) -> mx.array:
        window = reads.window and reads.window + 1
        return original(SimpleNamespace(**{**vars(reads), "window": window, "num_blocks": reads.num_blocks}))

    patch.setattr(Reads, "mask", property(mask))


def without_bias(name: str) -> Mutation:
    """Take the bias of one projection away; the module itself is shared with the original, so only for the call."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = Attention._project

        def project(self: Attention, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
            kept, bare = self[name], nn.Linear(1, 1, bias=False)
            bare.weight = kept.weight
            setattr(self, name, bare)
            projected = original(self, x)
            setattr(self, name, kept)
            return projected

        patch.setattr(Attention, "_project", project)

    return mutate


def absorbed_without_rope(patch: pytest.MonkeyPatch) -> None:
    original = LatentAttention._absorbed
    patch.setattr(LatentAttention, "_absorbed", lambda self, nope, rope, step: original(self, nope, rope * 0, step))


def decompressed_without_rope(patch: pytest.MonkeyPatch) -> None:
    original = LatentAttention._decompressed
    patch.setattr(LatentAttention, "_decompressed", lambda self, nope, rope, step: original(self, nope, rope * 0, step))


MUTATIONS: list[tuple[Mutation, str]] = [
    (wrong_scale, "llama"),
    (wrong_scale, "deepseek_v2"),
    (without_norms, "gemma3_text"),
    (without_query_norm, "qwen3"),
    (swapped_heads, "llama"),
    (swapped_heads, "phi3"),
    (rope_from_the_start, "mistral"),
    (rope_from_the_start, "deepseek_v2"),
    (without_sinks, "gpt_oss"),
    (longer_window, "mistral_sliding"),
    (longer_window, "gpt_oss"),
    (without_bias("v_proj"), "qwen2"),
    (without_bias("q_proj"), "gpt_oss"),
    (absorbed_without_rope, "deepseek_v2"),
    (decompressed_without_rope, "deepseek_v2_q_lora"),
]


@pytest.mark.parametrize(("mutate", "architecture"), MUTATIONS)
def test_the_check_notices(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, mutate: Mutation, architecture: str
) -> None:
    model, config = load_model(model_folder(architecture))
    mutate(monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"layer 0: the re-hosted attention differs from mlx-lm's"):
        rehost(model, architecture, config)


NO_NUMBERS = [float("nan"), float("inf"), -float("inf")]


def spoil(patch: pytest.MonkeyPatch, attention: type, value: float) -> None:
    """Let an attention give `value` in one place of a decode step."""
    original = attention.__call__

    @functools.wraps(original)  # modules are known by their call's signature
    def call(self: nn.Module, x: mx.array, *args: Any) -> mx.array:
        out = original(self, x, *args)
        if x.shape[1] == 1:
            out[0, 0, out.shape[2] // 2] = value
        return out

    patch.setattr(attention, "__call__", call)


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("side", ["ours", "mlx-lm's", "both"])
@pytest.mark.parametrize("architecture", ["llama", "deepseek_v2"])
def test_an_attention_whose_values_are_no_numbers_is_refused(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, architecture: str, side: str, value: float
) -> None:
    model, config = load_model(model_folder(architecture))
    if side != "ours":
        spoil(monkeypatch, type(model.layers[0].self_attn), value)
    if side != "mlx-lm's":
        spoil(monkeypatch, LatentAttention if architecture == "deepseek_v2" else Attention, value)
    with pytest.raises(UnsupportedModel, match=r"layer 0: the re-hosted attention differs from mlx-lm's by (nan|inf)"):
        rehost(model, architecture, config)


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v2"])
def test_weights_that_are_no_numbers_are_refused(model_folder: ModelFolder, architecture: str) -> None:
    """Both sides give NaN for all there is."""
    model, config = load_model(model_folder(architecture))
    model.layers[1].self_attn.o_proj.weight *= float("nan")
    with pytest.raises(UnsupportedModel, match=r"layer 1: the re-hosted attention differs from mlx-lm's by nan"):
        rehost(model, architecture, config)


def test_what_the_machine_cannot_run_is_refused_at_load(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = load_model(model_folder("qwen3_moe"))

    def fail(*args: Any, **kwargs: Any) -> mx.array:
        raise RuntimeError("[GatherMM::eval] Currently only supports float32.")

    monkeypatch.setattr(type(model.layers[1].mlp), "__call__", fail)
    with pytest.raises(UnsupportedModel, match="does not run on the re-hosted attention: .*only supports float32"):
        rehost(model, "qwen3_moe", config)


# -- models that are refused -------------------------------------------------------------------------------------------


def tiny_args(args: type, **entries: Any) -> Any:
    """An mlx-lm model's arguments, small wherever nothing else is said."""
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 50, "num_hidden_layers": 4, "head_dim": 32}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1} | entries
    known = inspect.signature(args).parameters
    return args(**{key: value for key, value in small.items() if key in known})


def test_a_state_space_model_is_refused() -> None:
    sizes = {"state_size": 4, "conv_kernel": 3, "use_bias": False, "use_conv_bias": False, "time_step_rank": 2}
    model = mamba.Model(tiny_args(mamba.ModelArgs, model_type="mamba", **sizes))
    with pytest.raises(UnsupportedModel, match="layer 0 keeps a ArraysCache, not keys and values per token"):
        rehost(model, "mamba", {})


def test_a_hybrid_model_is_refused() -> None:
    sizes = {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    sizes |= {"mamba_d_conv": 3, "mamba_d_state": 4, "mamba_expand": 2, "num_experts": 2, "num_experts_per_tok": 1}
    sizes |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 64, "mamba_dt_rank": 4, "mamba_proj_bias": False}
    model = jamba.Model(tiny_args(jamba.ModelArgs, model_type="jamba", mamba_conv_bias=True, **sizes))
    with pytest.raises(UnsupportedModel, match="layer 0 keeps a ArraysCache"):
        rehost(model, "jamba", {})


def test_layers_that_share_caches_are_refused() -> None:
    sizes = {"num_kv_shared_layers": 2, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
    sizes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    model = gemma4_text.Model(tiny_args(gemma4_text.ModelArgs, **sizes))
    with pytest.raises(UnsupportedModel, match="4 layers share 2 caches"):
        rehost(model, "gemma4_text", {})


def test_layers_without_rope_are_refused() -> None:
    sizes = {"sliding_window": 16, "sliding_window_pattern": 2}
    model = cohere2.Model(tiny_args(cohere2.ModelArgs, model_type="cohere2", **sizes))
    with pytest.raises(UnsupportedModel, match=r"layer \d"):
        rehost(model, "cohere2", {})


def test_dynamic_rope_is_refused(model_folder: ModelFolder) -> None:
    folder = model_folder("llama", rope_scaling={"type": "dynamic", "rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="layer 0 uses dynamic NTK rope"):
        rehost(*load(folder))


@pytest.mark.parametrize("head_dim", [40, 80])
def test_head_dimensions_without_groups_are_refused(model_folder: ModelFolder, head_dim: int) -> None:
    with pytest.raises(UnsupportedModel, match=rf"\({head_dim},\) are not multiples of 32"):
        rehost(*load(model_folder("llama", head_dim=head_dim, rope_scaling=None)))


def load(folder: Path) -> tuple[nn.Module, str, dict[str, Any]]:
    model, config = load_model(folder)
    return model, config["model_type"], config


def test_a_window_that_keeps_the_first_tokens_is_refused(model_folder: ModelFolder) -> None:
    model, name, config = load(model_folder("llama"))
    model.make_cache = lambda: [RotatingKVCache(max_size=64, keep=4) for _ in model.layers]
    with pytest.raises(UnsupportedModel, match="layer 0 attends to its first 4 tokens and to a window"):
        rehost(model, name, config)


def test_a_mask_with_another_window_than_the_cache_is_refused(model_folder: ModelFolder) -> None:
    model, name, config = load(model_folder("mistral_sliding"))
    model.make_cache = lambda: [KVCache() for _ in model.layers]
    with pytest.raises(UnsupportedModel, match="window is None, the model asks for 32"):
        rehost(model, name, config)


def test_an_attention_of_unknown_shape_is_refused(model_folder: ModelFolder) -> None:
    model, name, config = load(model_folder("llama"))
    model.layers[2].self_attn = nn.Linear(4, 4)
    with pytest.raises(UnsupportedModel, match=r"layer 2 \(TransformerBlock\) has no attention module of a known"):
        rehost(model, name, config)
