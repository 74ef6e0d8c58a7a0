"""Which models and adapters can have residuals, and what a model's layers do to keys: found, and proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from agentcache.errors import UnsupportedPolicy
from agentcache.models.layers import Stand
from agentcache.models.loader import LoadedModel
from agentcache.models.residual.forms import ResidualSupport
from agentcache.models.residual.spec import ResidualLayer
from tests.models import zoo
from tests.models.driver import Driver
from tests.models.model_files import MODEL_FILES
from tests.models.residual.oracle import KEYS_AND_VALUES, adapter, small_model

SERVED = {
    "llama": False,
    "qwen2": False,
    "qwen3": True,
    "gemma2": False,
    "gemma3_text": True,
    "phi3": False,
    "gptj": False,
    "step3p5": True,
    "smollm3": False,  # some layers without rope
}
REFUSED = {
    "deepseek_v2": "latent",
    "deepseek_v3": "latent",
    "olmo2": "norms its keys over all heads",
    "qwen3_next": "recurrent",
    "hunyuan_v1_dense": "does more to its keys",  # a norm behind rope
    "gemma4_text": "does more to its values",
    "gpt2": "does not make its keys and values by k_proj and v_proj",
    "iquestloopcoder": "one cache of keys and values each",  # runs through its layers twice
}


def load(name: str) -> LoadedModel:
    return zoo.load(name, MODEL_FILES[name].config, check=False)


@pytest.mark.parametrize("name", SERVED)
def test_models_whose_keys_split(name: str) -> None:
    loaded = load(name)
    support = loaded.adapters.residual_forms.support
    assert support.refusal == ""
    assert support.dtype == "float32"
    assert support.normed == (frozenset(range(len(loaded.inspection.layers))) if SERVED[name] else frozenset())


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_keys_do_not_are_refused_by_what_is_in_the_way(name: str) -> None:
    forms = load(name).adapters.residual_forms
    assert REFUSED[name] in forms.support.refusal
    assert not forms.layers


def test_a_layer_that_does_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("llama")

    class Bent(Stand):
        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            rotated: mx.array = self.original(x, offset=offset)
            return rotated + 0.02 * mx.square(rotated)

    attention = loaded.model.layers[2].self_attn
    attention.rope = Bent(attention.rope)
    assert loaded.adapters.residual_forms.support.refusal.startswith("layer 2 does more to its keys")


def test_the_model_is_as_before_when_the_proof_is_over() -> None:
    loaded = load("qwen3")
    ids = np.arange(20)
    modules = {name: id(module) for name, module in loaded.model.named_modules()}
    before = Driver(loaded).logits(ids, [20])
    assert not loaded.adapters.residual_forms.support.refusal
    assert {name: id(module) for name, module in loaded.model.named_modules()} == modules
    assert mx.array_equal(Driver(loaded).logits(ids, [20]), before)


def layers_of(loaded: LoadedModel, folder: Path, rank: int, targets: Sequence[str]) -> list[ResidualLayer]:
    weights = adapter(loaded, folder, rank, targets=targets)
    return list(loaded.adapters.residual_forms.support.shape_of(weights.adapter).layers)


@pytest.mark.parametrize("model", ["qwen3", "phi3"])
def test_ranks_are_those_that_act_on_keys_and_on_values(model: str, tmp_path: Path) -> None:
    """Also where one module makes both: there an adapter of parts has the ranks of all of them side by side."""
    loaded, normed = small_model(model), model == "qwen3"
    both = [ResidualLayer(layer, 5, 5, normed) for layer in (0, 1)]
    assert layers_of(loaded, tmp_path / "all", 5, ("self_attn.q_proj", *KEYS_AND_VALUES)) == both
    only_values = [ResidualLayer(layer, 0, 3, normed) for layer in (0, 1)]
    assert layers_of(loaded, tmp_path / "v", 3, ("self_attn.q_proj", "self_attn.v_proj")) == only_values


def test_an_adapter_of_a_whole_fused_module_has_its_rank_on_both_sides(tmp_path: Path) -> None:
    loaded = small_model("phi3")
    expected = [ResidualLayer(layer, 7, 7, normed=False) for layer in (0, 1)]
    assert layers_of(loaded, tmp_path, 7, ["self_attn.qkv_proj"]) == expected


def refusal(support: ResidualSupport, weights: Any, **changes: Any) -> str:
    with pytest.raises(UnsupportedPolicy) as caught:
        support.shape_of(replace(weights.adapter, **changes))
    assert (caught.value.status, caught.value.param) == (400, "agentcache.policy")
    return caught.value.message


def test_adapters_that_cannot_be_kept_beside_base_are_refused_by_name(tmp_path: Path) -> None:
    loaded = small_model("llama")
    support = loaded.adapters.residual_forms.support
    weights = adapter(loaded, tmp_path / "kv", 2)
    assert "an activated one" in refusal(support, weights, invocation_tokens=(1, 2))
    outside = adapter(loaded, tmp_path / "o", 2, targets=["self_attn.o_proj", "mlp.up_proj"])
    assert "adds nothing to keys or values" in refusal(support, outside)
    latents = zoo.load("deepseek_v2", MODEL_FILES["deepseek_v2"].config, check=False)
    weights = adapter(latents, tmp_path / "mla", 2, targets=["self_attn.kv_a_proj_with_mqa"])
    assert "layers.0.self_attn.kv_a_proj_with_mqa" in refusal(support, weights)
    assert "latent (MLA)" in refusal(latents.adapters.residual_forms.support, weights)
