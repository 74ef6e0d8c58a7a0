"""What would give other numbers than mlx-lm is refused at load, by the layer's number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import load_model

from agentcache import compat
from agentcache.errors import UnsupportedModel
from agentcache.kv.reads import Reads
from agentcache.kv.step_cache import PagedKV, StepCache
from agentcache.models import attachment, interception, mla, proof
from agentcache.models.attachment import host, host_in_pieces
from agentcache.models.attention import AttentionOptions
from tests.conftest import ModelFolder
from tests.device_marks import cpu_memory
from tests.models import zoo
from tests.models.model_files import MODEL_FILES

Mutation = Callable[[pytest.MonkeyPatch], None]
DIFFERS = r"layer \d+: (attention|its output) on the paged cache differs from mlx-lm's"


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    for module in (interception, mla):
        patch.setattr(module, "AttentionOptions", lambda scale, *rest: AttentionOptions(scale * 1.02, *rest))


def without_sinks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(interception, "AttentionOptions", lambda scale, cap, sinks: AttentionOptions(scale, cap))


def without_softcap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attachment, "AttentionOptions", lambda scale, cap: AttentionOptions(scale))


def swapped_heads(patch: pytest.MonkeyPatch) -> None:
    original = interception.paged_attention
    patch.setattr(interception, "paged_attention", lambda queries, *rest: original(queries[:, ::-1], *rest))


def rope_from_the_start(patch: pytest.MonkeyPatch) -> None:
    original = StepCache.__init__
    patch.setattr(StepCache, "__init__", lambda self, *args: original(self, *args[:-1], 0))


def window_off_by(by: int) -> Mutation:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = Reads.__init__

        def init(self: Reads, tables: Any, lengths: Any, num_tokens: int, window: int | None, *others: Any) -> None:
            original(self, tables, lengths, num_tokens, window and window + by, *others)

        patch.setattr(Reads, "__init__", init)

    return mutate


def wrong_shared_layer(patch: pytest.MonkeyPatch) -> None:
    """Whoever reads what another layer has written reads the first layer's instead."""
    original, seen = interception.paged_attention, []

    def attend(queries: mx.array, kv: PagedKV, options: AttentionOptions) -> mx.array:
        shared = any(kv.reads is other.reads and kv.arena is other.arena for other in seen)
        seen.append(kv)
        same = [other for other in seen if other.arena.keys.dim == kv.arena.keys.dim and other.arena is not kv.arena]
        return original(queries, kv._replace(arena=same[0].arena) if shared and same else kv, options)

    patch.setattr(interception, "paged_attention", attend)


def without_gate(patch: pytest.MonkeyPatch) -> None:
    attention = qwen3_next.Qwen3NextAttention
    original, sigmoid = attention.__call__, mx.sigmoid

    def call(self: nn.Module, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        with pytest.MonkeyPatch.context() as gate:
            gate.setattr(mx, "sigmoid", mx.ones_like if isinstance(cache, StepCache) else sigmoid)
            return original(self, x, mask, cache)

    patch.setattr(attention, "__call__", call)


def latent_without_rope(patch: pytest.MonkeyPatch) -> None:
    def without(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return lambda latent, rope, *rest, **named: attention(latent, rope * 0, *rest, **named)

    patch.setattr(mla, "packed_latent_attention", without(mla.packed_latent_attention))
    patch.setattr(mla, "attend_latents", without(mla.attend_latents))


def decompressed_without_rope(patch: pytest.MonkeyPatch) -> None:
    original = mla.decompress

    def decompress(cached: mx.array, projections: mla.Projections) -> tuple[mx.array, mx.array]:
        kept = mx.arange(cached.shape[-1]) < projections.rank
        return original(cached * kept, projections)

    patch.setattr(mla, "decompress", decompress)


MUTATIONS: list[tuple[Mutation, str]] = [
    (wrong_scale, "llama"),
    (wrong_scale, "youtu_llm"),
    (wrong_scale, "deepseek_v3"),
    (wrong_scale, "qwen3_5"),
    (without_sinks, "gpt_oss"),
    (without_softcap, "gemma2"),
    (swapped_heads, "qwen3"),
    (rope_from_the_start, "qwen2"),
    (rope_from_the_start, "youtu_llm"),
    (rope_from_the_start, "glm4_moe_lite"),
    (window_off_by(1), "gemma3_text"),
    (window_off_by(-1), "gpt_oss"),
    (wrong_shared_layer, "gemma4"),
    (without_gate, "qwen3_next"),
    (latent_without_rope, "youtu_llm"),
    (latent_without_rope, "deepseek_v3"),
    (decompressed_without_rope, "youtu_llm"),
    (decompressed_without_rope, "mistral4"),
]


@pytest.mark.parametrize(("mutate", "name"), MUTATIONS)
def test_the_proof_notices(monkeypatch: pytest.MonkeyPatch, mutate: Mutation, name: str) -> None:
    mutate(monkeypatch)
    with pytest.raises(UnsupportedModel, match=DIFFERS):
        zoo.load(name, MODEL_FILES[name].config)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("mutate", "name"), [(wrong_scale, "llama"), (window_off_by(1), "gemma3_text")])
def test_the_proof_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, mutate: Mutation, name: str, dtype: mx.Dtype
) -> None:
    """Less is noticed there; not a scale that is a fiftieth too large, but one of twice the size."""
    if mutate is wrong_scale:
        doubled = lambda scale, *rest: AttentionOptions(scale * 2, *rest)  # noqa: E731
        mutate = lambda patch: patch.setattr(interception, "AttentionOptions", doubled)  # noqa: E731
    model = zoo.build(name, MODEL_FILES[name].config)
    model.set_dtype(dtype)
    host(model, name, MODEL_FILES[name].config)
    mutate(monkeypatch)
    model = zoo.build(name, MODEL_FILES[name].config)
    model.set_dtype(dtype)
    with pytest.raises(UnsupportedModel, match=DIFFERS):
        host(model, name, MODEL_FILES[name].config)


@cpu_memory
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "deepseek_v3"])
def test_it_is_computed_a_layer_at_a_time(name: str) -> None:
    """What layers give stays in memory as long as it is to be compared: it grows by a layer's share with each piece."""
    config = MODEL_FILES[name].config | {"num_hidden_layers": 8}
    model, taken = zoo.build(name, config), list[int]()
    for _ in host_in_pieces(model, name, config):
        mx.synchronize()
        taken.append(mx.get_active_memory())
    steps = [max(0, after - before) for before, after in itertools.pairwise(taken)]
    assert len(steps) > 8 and max(steps) < sum(steps) / 2, steps


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["ours", "mlx-lm's", "both"])
def test_an_attention_whose_values_are_no_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch, side: str, value: float
) -> None:
    if side != "mlx-lm's":
        monkeypatch.setattr(
            interception, "paged_attention", lambda q, kv, o, f=interception.paged_attention: f(q, kv, o) * value
        )
    if side != "ours":
        original = compat.scaled_dot_product_attention
        spoilt = lambda *args, **kwargs: original(*args, **kwargs) * value  # noqa: E731
        monkeypatch.setattr(interception, "scaled_dot_product_attention", spoilt)
        monkeypatch.setattr("mlx_lm.models.llama.scaled_dot_product_attention", interception.attention)
    with pytest.raises(UnsupportedModel, match=r"differs from mlx-lm's by (nan|inf)"):
        zoo.load("llama", MODEL_FILES["llama"].config)


@pytest.mark.parametrize(("off", "passes"), [(5e-4, True), (2e-2, False)])
def test_where_a_device_rounds_products_layers_may_be_off_by_as_much(
    monkeypatch: pytest.MonkeyPatch, off: float, passes: bool
) -> None:
    """As CUDA does, whose float32 products are TF32."""
    original = interception.paged_attention
    monkeypatch.setattr(interception, "paged_attention", lambda *args: original(*args) * (1 + off))
    assert proof.product_error() < 1e-6
    with pytest.raises(UnsupportedModel, match=DIFFERS):
        zoo.load("llama", MODEL_FILES["llama"].config)
    monkeypatch.setattr(proof, "product_error", lambda: 1e-4)
    with nullcontext() if passes else pytest.raises(UnsupportedModel, match=DIFFERS):
        zoo.load("llama", MODEL_FILES["llama"].config)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_weights_that_are_no_numbers_are_refused(name: str) -> None:
    """Both sides give NaN for all there is."""
    model = zoo.build(name, MODEL_FILES[name].config)
    model.layers[1].self_attn.o_proj.weight *= float("nan")
    with pytest.raises(UnsupportedModel, match=r"layer 1: its output on the paged .* mlx-lm's by nan"):
        host(model, name, MODEL_FILES[name].config)


def test_what_the_machine_cannot_run_is_refused(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    model, name, config = load(model_folder("qwen3_moe"))

    def fail(*args: Any, **kwargs: Any) -> mx.array:
        raise RuntimeError("[GatherMM::eval] Currently only supports float32.")

    monkeypatch.setattr(type(model.layers[1].mlp), "__call__", fail)
    with pytest.raises(UnsupportedModel, match="Model does not run: .*only supports float32"):
        host(model, name, config)


# -- models that are refused -------------------------------------------------------------------------------------------


def load(folder: Path) -> tuple[nn.Module, str, dict[str, Any]]:
    model, config = load_model(folder)
    return model, config["model_type"], config


def test_dynamic_rope_is_refused(model_folder: ModelFolder) -> None:
    folder = model_folder("llama", rope_scaling={"type": "dynamic", "rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="layer 0 uses dynamic NTK rope"):
        host(*load(folder))


@pytest.mark.parametrize("head_dim", [40, 80])
def test_head_dimensions_without_groups_are_refused(model_folder: ModelFolder, head_dim: int) -> None:
    with pytest.raises(UnsupportedModel, match=rf"\({head_dim},\) are not multiples of 32"):
        host(*load(model_folder("llama", head_dim=head_dim, rope_scaling=None)))


def test_a_window_that_keeps_the_first_tokens_is_refused(model_folder: ModelFolder) -> None:
    model, name, config = load(model_folder("llama"))
    model.make_cache = lambda: [RotatingKVCache(max_size=64, keep=4) for _ in model.layers]
    with pytest.raises(UnsupportedModel, match="layer 0 attends to its first 4 tokens and to a window"):
        host(model, name, config)


def test_a_mask_with_another_window_than_the_cache_is_refused(model_folder: ModelFolder) -> None:
    model, name, config = load(model_folder("mistral_sliding"))
    model.make_cache = lambda: [KVCache() for _ in model.layers]
    with pytest.raises(UnsupportedModel, match="window is None, the model asks for 32"):
        host(model, name, config)


def test_a_model_that_masks_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its mask says: nothing proves that it says the same for longer prompts."""
    from mlx_lm.models import llama

    monkeypatch.setattr(llama, "create_attention_mask", lambda h, *rest, **kwargs: mx.ones((h.shape[1], 1), mx.bool_))
    with pytest.raises(UnsupportedModel, match="the model passes a mask of its own"):
        zoo.load("llama", MODEL_FILES["llama"].config)


def test_layers_that_are_computed_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama", MODEL_FILES["llama"].config)
    kind = type(model)
    monkeypatch.setattr(kind, "layers", property(lambda self: self.model.layers[::-1]))
    with pytest.raises(UnsupportedModel, match="does not compute its layers one after the other"):
        host(model, "llama", MODEL_FILES["llama"].config)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "deepseek_v3", "youtu_llm", "gemma3_text"])
def test_a_device_may_round_a_row_s_product_by_the_rows_beside_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Most do. A key between two steps of the quantiser went the other way then, and the model was refused."""
    original = nn.Linear.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: original(self, x) * (1 + 4e-5 * (x.shape[0] - 1)))
    zoo.load(name, MODEL_FILES[name].config)
