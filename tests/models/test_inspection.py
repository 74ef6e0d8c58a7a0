"""What a model caches, read off a run."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from agentcache.errors import UnsupportedModel
from agentcache.kv.spec import LayerSpec, RecurrentSpec, StateTensor
from agentcache.models.inspection import Inspection, Paged, Recurrent, inspect_model
from agentcache.models.layers import hooked, layer_lists
from tests.models import zoo
from tests.models.model_files import MODEL_FILES


def look_at(name: str) -> Inspection:
    return inspect_model(zoo.build(name, MODEL_FILES[name].config))


def test_layers_of_two_kinds() -> None:
    seen = look_at("gemma3_text")
    assert seen.refs == tuple(map(Paged, range(4)))
    assert seen.layers == tuple(LayerSpec(i, 2, 32, 32, window) for i, window in enumerate([12, None, 12, None]))
    assert not seen.recurrent and seen.num_heads == 4 and seen.hidden_bytes == 128 * 4


def test_a_state_beside_keys_and_values_in_one_layer() -> None:
    seen = look_at("falcon_h1")
    assert seen.refs == tuple((Recurrent(i), Paged(i)) for i in range(4))
    convolution, state = StateTensor((3, 160), "float32"), StateTensor((4, 32, 16), "float32")
    assert seen.recurrent == tuple(RecurrentSpec(i, (convolution, state)) for i in range(4))
    assert seen.hidden_bytes == 0, "a step cannot pass by a layer that keeps a state"


def test_layers_without_a_cache_are_counted() -> None:
    seen = look_at("nemotron_h")
    assert seen.refs == (Paged(0), Recurrent(0), Paged(1), Recurrent(1))
    assert [layer.index for layer in seen.layers] == [0, 3] and [each.index for each in seen.recurrent] == [1, 4]


def test_layers_that_read_others_keys() -> None:
    seen = look_at("gemma4")
    assert [layer.index for layer in seen.layers] == [0, 1, 2, 3] and len(seen.refs) == 4


def test_two_caches_of_one_layer_have_names_of_their_own() -> None:
    seen = look_at("longcat_flash")
    assert [(layer.index, layer.nth) for layer in seen.layers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    spec = seen.spec("longcat_flash", {})
    names = [tensor.name for group in spec.groups for tensor in group.tensors]
    assert len(names) == len(set(names)) and "cache.layers.1.1.key_cache.@.data" in names


def test_a_model_that_runs_through_its_layers_twice() -> None:
    seen = look_at("nanbeige")
    assert [layer.index for layer in seen.layers] == list(range(8)) and seen.hidden_bytes == 0


def test_latents() -> None:
    (latent, *_), (other, *_) = look_at("deepseek_v3").latents, look_at("youtu_llm").latents
    assert (latent.rank, latent.rope, latent.nope) == (32, 32, None)
    assert (other.rank, other.rope, other.nope) == (32, 32, 32)


def test_which_linears_come_behind_what_a_layer_caches() -> None:
    linears = look_at("llama").linears
    behind = {path for (layer, path), is_behind in linears.items() if layer == 1 and is_behind}
    assert behind == {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert not any(linears[1, f"self_attn.{side}_proj"] for side in "qkv")


@pytest.mark.parametrize("name", ["llama", "olmo_hybrid", "qwen3_5"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model = zoo.build(name, MODEL_FILES[name].config)
    kinds = [(path, type(module)) for path, module in model.named_modules()]
    before = model(mx.arange(5)[None])
    inspect_model(model)
    assert [(path, type(module)) for path, module in model.named_modules()] == kinds
    assert mx.array_equal(model(mx.arange(5)[None]), before)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Linear does not run|Linear has no list of layers"):
        inspect_model(nn.Linear(2, 2))


def test_a_hook_computes_layers_of_another_input() -> None:
    model = zoo.build("gptj", MODEL_FILES["gptj"].config)  # which names its layers' input
    (layers,) = layer_lists(model)
    seen = []
    with hooked(model, lambda call: seen.append(call.x) or call.compute(call.x * 0)):
        zeros = model(mx.arange(5)[None])
    assert len(seen) == len(layers) and not mx.allclose(zeros, model(mx.arange(5)[None])).item()
