"""Adapters fitted to models: who they are, where they act, and what of the cache they leave to base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_model

from agentcache.errors import UnsupportedAdapter
from agentcache.kv.spec import CacheSpec
from agentcache.models.adapter_files import ModuleName
from agentcache.models.adapters import (
    AdapterContent,
    TargetModules,
    producer_groups,
    read_adapter,
    read_again,
    target_modules,
)
from agentcache.models.attachment import host
from tests.adapters_factory import Pair, make_adapter, random_matrices, write_mlx_lm, write_peft
from tests.conftest import ModelFolder
from tests.tiny import ARCHITECTURES

LATENT = {"self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"}


@cache
def look_at(folder: Path) -> tuple[TargetModules, CacheSpec]:
    model, config = load_model(folder)
    hosted = host(model, config["model_type"], config, check=False)
    return target_modules(model.layers, hosted.inspection), hosted.spec


def read(folder: Path, model: Path) -> AdapterContent:
    return read_adapter(folder, look_at(model)[0])


# -- what there is to adapt --------------------------------------------------------------------------------------------

ATTENTION = {f"self_attn.{side}_proj" for side in "qkvo"}
MLP = {f"mlp.{side}_proj" for side in ("gate", "up", "down")}
PLACES: dict[str, set[str]] = {
    "llama_bias": ATTENTION | MLP,
    "gemma3": ATTENTION | MLP,
    "phi3": ATTENTION | MLP | {"self_attn.qkv_proj", "mlp.gate_up_proj"},
    "gpt_oss": ATTENTION | {"mlp.router"},
    "qwen3_moe": ATTENTION | {"mlp.gate"},
    "deepseek_v2": LATENT | {"self_attn.q_proj"} | {f"mlp.shared_experts.{name[4:]}" for name in MLP},
    "deepseek_v2_q_lora": LATENT
    | {"self_attn.q_a_proj", "self_attn.q_b_proj"}
    | {f"mlp.shared_experts.{name[4:]}" for name in MLP},
}


@pytest.mark.parametrize("architecture", PLACES)
def test_every_linear_of_a_layer_can_be_adapted(model_folder: ModelFolder, architecture: str) -> None:
    modules, spec = look_at(model_folder(architecture))
    last = spec.num_layers - 1
    assert {name.path for name in modules.targets if name.layer == last} == PLACES[architecture]


def test_sizes_are_those_of_dense_weights(model_folder: ModelFolder) -> None:
    modules, _ = look_at(model_folder("deepseek_v2"))
    shape = modules.linears[ModuleName(2, "self_attn.kv_a_proj_with_mqa")]
    assert (shape.in_dim, shape.out_dim, shape.item_bytes) == (128, 96, 4)


REFUSED = [
    ("deepseek_v2", "model.layers.1.self_attn.kv_b_proj", "kv_b_proj cannot be adapted: attention has absorbed"),
    ("llama", "model.layers.4.self_attn.q_proj", "layers.4.self_attn.q_proj is not in the model, which has 4 layers"),
    ("llama", "model.layers.1.self_attn.qkv_proj", "layers.1.self_attn.qkv_proj is not a linear module of the model"),
    ("llama", "model.layers.1.input_layernorm", "layers.1.input_layernorm is not a linear module of the model"),
    ("llama", "model.layers.1.self_attn", "layers.1.self_attn is not a linear module of the model"),
    ("deepseek_v2", "model.layers.1.mlp.gate", "layers.1.mlp.gate is not a linear module of the model"),
    ("gpt_oss", "model.layers.1.mlp.experts.up_proj", "mlp.experts.up_proj: adapters of experts are not supported"),
]


@pytest.mark.parametrize(("architecture", "name", "sentence"), REFUSED)
def test_other_modules_are_refused_by_name(
    model_folder: ModelFolder, tmp_path: Path, architecture: str, name: str, sentence: str
) -> None:
    folder = write_mlx_lm(tmp_path, {name: Pair(np.ones((8, 3), np.float32), np.ones((3, 8), np.float32))})
    with pytest.raises(UnsupportedAdapter, match=f"the adapter in {tmp_path} cannot be served: .*{sentence}"):
        read(folder, model_folder(architecture))


@pytest.mark.parametrize("name", ["q_proj", "qkv_proj"])
@pytest.mark.parametrize(("a", "b"), [((127, 3), (3, 128)), ((128, 3), (3, 64))])
def test_an_adapter_of_another_model_is_refused(
    model_folder: ModelFolder, tmp_path: Path, name: str, a: tuple[int, int], b: tuple[int, int]
) -> None:
    path = f"model.layers.0.self_attn.{name}"
    folder = write_mlx_lm(tmp_path, {path: Pair(np.ones(a, np.float32), np.ones(b, np.float32))})
    wanted = 256 if name == "qkv_proj" else 128
    with pytest.raises(UnsupportedAdapter, match=f"made for {a[0]} inputs and {b[1]} outputs; .* 128 and {wanted}$"):
        read(folder, model_folder("phi3"))


# -- identity ----------------------------------------------------------------------------------------------------------


def digests(model: Path, *folders: Path) -> list[str]:
    return [read(folder, model).adapter.digest for folder in folders]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_formats_are_the_same_adapter(model_folder: ModelFolder, tmp_path: Path, architecture: str) -> None:
    model = model_folder(architecture)
    pairs = random_matrices(model)
    contents = [read(write_mlx_lm(tmp_path / "a", pairs), model), read(write_peft(tmp_path / "b", pairs), model)]
    first, second = (content.adapter for content in contents)
    assert first.digest == second.digest and len(first.digest) == 40
    assert (first.format, second.format) == ("mlx-lm", "peft")
    assert first.ranks == second.ranks and set(first.ranks.values()) == {3}
    for name in first.ranks:
        np.testing.assert_array_equal(contents[0].matrices[name].b, contents[1].matrices[name].b)


def test_names_and_places_of_folders_do_not_count(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("llama")
    folder = make_adapter(tmp_path / "a", model)
    moved = Path(shutil.copytree(folder, tmp_path / "b"))
    (moved / "README.md").write_text("another name")
    assert len(set(digests(model, folder, moved))) == 1


def test_how_it_was_trained_does_not_count(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Fields of the config that decide no byte, of both trainers."""
    model = model_folder("llama")
    pairs = random_matrices(model)
    mlx_lm, peft = write_mlx_lm(tmp_path / "a", pairs), write_peft(tmp_path / "b", pairs)
    before = digests(model, mlx_lm, peft)
    for folder, fields in (
        (mlx_lm, {"learning_rate": 1e-3, "iters": 7, "seed": 9, "data": "elsewhere", "model": "another name"}),
        (peft, {"lora_dropout": 0.5, "inference_mode": False, "base_model_name_or_path": "x", "peft_version": "99"}),
    ):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert digests(model, mlx_lm, peft) == before
    assert len(set(before)) == 1


def test_effective_scale_and_weights_count(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("llama")
    pairs = random_matrices(model)
    doubled = {name: Pair(pair.a, 2 * pair.b) for name, pair in pairs.items()}
    nudged = {name: Pair(pair.a.copy(), pair.b) for name, pair in pairs.items()}
    next(iter(nudged.values())).a[5, 1] += 1e-6
    fewer = dict(list(pairs.items())[1:])
    folders = [
        write_mlx_lm(tmp_path / "plain", pairs, scale=2.0),
        write_mlx_lm(tmp_path / "scaled", pairs, scale=4.0),
        write_mlx_lm(tmp_path / "nudged", nudged, scale=2.0),
        write_mlx_lm(tmp_path / "fewer", fewer, scale=2.0),
        write_peft(tmp_path / "stabilised", pairs, scale=2.0, use_rslora=True),
        write_mlx_lm(tmp_path / "doubled", doubled, scale=2.0),
        write_peft(tmp_path / "half of doubled", doubled, scale=1.0),
    ]
    plain, scaled, nudge, few, stable, double, half = digests(model, *folders)
    assert len({plain, scaled, nudge, few, stable}) == 5
    assert double == scaled and half == plain


def test_equal_matrices_of_other_modules_are_another_adapter(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("llama")
    pair = random_matrices(model, ["self_attn.k_proj"])["model.layers.1.self_attn.k_proj"]
    names = [f"model.layers.{place}" for place in ("1.self_attn.k_proj", "1.self_attn.v_proj", "2.self_attn.k_proj")]
    folders = [write_mlx_lm(tmp_path / name, {name: pair}) for name in names]
    assert len(set(digests(model, *folders))) == 3


def test_a_folder_that_has_changed_is_not_taken_for_the_old_one(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("llama")
    modules, _ = look_at(model)
    adapter = read(make_adapter(tmp_path, model), model).adapter
    assert read_again(adapter, modules).adapter == adapter
    make_adapter(tmp_path, model, seed=1)
    with pytest.raises(UnsupportedAdapter, match="has changed since it was loaded"):
        read_again(adapter, modules)


# -- layers, groups, bytes ---------------------------------------------------------------------------------------------

KEYS, VALUES, QUERIES, OUTPUT = (f"self_attn.{side}_proj" for side in "kvqo")
UP = "mlp.up_proj"
FIRST_LAYERS: list[tuple[str, Collection[str], Collection[int], int, int, set[int]]] = [
    # architecture, targets, adapted layers, first layer, first layer whose keys or values differ, groups
    ("llama", (KEYS,), (0,), 0, 0, {0, 1}),
    ("llama", (VALUES,), (2, 3), 2, 2, {1}),
    ("llama", (QUERIES, OUTPUT, UP), (2,), 2, 3, {1}),
    ("llama", (QUERIES, OUTPUT, UP), (1,), 1, 2, {1}),
    ("llama", (QUERIES, OUTPUT, UP), (3,), 3, 4, set()),
    ("llama", (QUERIES, VALUES), (3,), 3, 3, {1}),
    ("qwen3", (QUERIES, KEYS), (5, 7), 5, 5, {2, 3}),
    ("qwen3", (OUTPUT,), (5,), 5, 6, {3}),
    ("phi3", ("self_attn.qkv_proj",), (1,), 1, 1, {0, 1}),
    ("phi3", ("mlp.gate_up_proj",), (1,), 1, 2, {1}),
    ("mistral_sliding", (KEYS,), (1,), 1, 1, {1, 2, 3}),
    ("deepseek_v2", ("self_attn.kv_a_proj_with_mqa",), (3,), 3, 3, {1}),
    ("deepseek_v2", ("self_attn.q_proj",), (2,), 2, 3, {1}),
    ("deepseek_v2_q_lora", ("self_attn.q_a_proj", "self_attn.q_b_proj"), (3,), 3, 4, set()),
]


@pytest.mark.parametrize(("architecture", "targets", "layers", "first", "first_kv", "groups"), FIRST_LAYERS)
def test_layers_below_the_first_adapted_one_are_base(
    model_folder: ModelFolder,
    tmp_path: Path,
    architecture: str,
    targets: Collection[str],
    layers: Collection[int],
    first: int,
    first_kv: int,
    groups: set[int],
) -> None:
    model = model_folder(architecture)
    adapter = read(make_adapter(tmp_path, model, targets=targets, layers=layers), model).adapter
    assert (adapter.first_layer, adapter.first_kv_layer) == (first, first_kv)
    assert producer_groups(adapter, look_at(model)[1]) == groups


def test_what_counts_are_the_tensors_not_the_config(model_folder: ModelFolder, tmp_path: Path) -> None:
    """mlx-lm's default says 16 layers whatever the model has."""
    model = model_folder("llama")
    folder = make_adapter(tmp_path, model, layers=[2], config={"num_layers": 16})
    assert read(folder, model).adapter.first_layer == 2
    assert {name.layer for name in read(folder, model).adapter.ranks} == {2}


@pytest.mark.parametrize(("part", "first_kv"), [("q_proj", 2), ("k_proj", 1), ("v_proj", 1)])
def test_parts_of_a_fused_module(model_folder: ModelFolder, tmp_path: Path, part: str, first_kv: int) -> None:
    model = model_folder("phi3")
    columns = {"q_proj": (0, 128), "k_proj": (128, 192), "v_proj": (192, 256)}[part]
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((128, 3)), rng.standard_normal((3, columns[1] - columns[0]))
    pairs = {f"model.layers.1.self_attn.{part}": Pair(a.astype(np.float32), b.astype(np.float32))}
    content = read(write_mlx_lm(tmp_path, pairs, scale=1.0), model)
    fused = content.matrices[ModuleName(1, "self_attn.qkv_proj")]
    np.testing.assert_array_equal(fused.a, a.astype(np.float32))
    np.testing.assert_array_equal(fused.b[:, slice(*columns)], b.astype(np.float32))
    assert np.count_nonzero(fused.b) == b.size
    assert content.adapter.first_kv_layer == first_kv


def fused_and_parts() -> dict[str, Any]:
    """q, v and the fused module itself, of ranks 3, 5 and 2; and gate and up."""
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (3, 128),
        "self_attn.v_proj": (5, 64),
        "self_attn.qkv_proj": (2, 256),
        "mlp.gate_proj": (4, 192),
        "mlp.up_proj": (3, 192),
    }
    return {
        f"model.layers.1.{path}": Pair(
            rng.standard_normal((128, rank)).astype(np.float32), rng.standard_normal((rank, out)).astype(np.float32)
        )
        for path, (rank, out) in shapes.items()
    }


def test_parts_of_a_fused_module_add_up(model_folder: ModelFolder, tmp_path: Path) -> None:
    model, pairs = model_folder("phi3"), fused_and_parts()
    ranks = {path.split(".", 3)[3]: pair.b.shape[0] for path, pair in pairs.items()}
    folder = write_peft(tmp_path, pairs, r=9, lora_alpha=1, rank_pattern=ranks, alpha_pattern=ranks)
    content = read(folder, model)
    full = {name.path: pair.a @ pair.b for name, pair in content.matrices.items()}
    part = {path.rpartition(".")[2]: pair.a @ pair.b for path, pair in pairs.items()}
    expected = part["qkv_proj"].copy()
    expected[:, :128] += part["q_proj"]
    expected[:, 192:] += part["v_proj"]
    np.testing.assert_allclose(full["self_attn.qkv_proj"], expected, rtol=1e-4, atol=1e-4)
    gate_up = np.concatenate([part["gate_proj"], part["up_proj"]], axis=1)
    np.testing.assert_allclose(full["mlp.gate_up_proj"], gate_up, rtol=1e-4, atol=1e-4)
    assert content.adapter.ranks == {(1, "self_attn.qkv_proj"): 10, (1, "mlp.gate_up_proj"): 7}


def test_bytes_on_the_device(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("llama")
    adapter = read(make_adapter(tmp_path, model, targets=[KEYS, "mlp.down_proj"], rank=5), model).adapter
    assert adapter.nbytes == 4 * 5 * ((128 + 128) + (192 + 128)) * 4


def test_when_an_adapter_acts_comes_from_the_config(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = model_folder("llama")
    config = {"alora_invocation_tokens": [5, 6], "activation_shift": 1}
    adapter = read(make_adapter(tmp_path, model, writer=write_peft, config=config), model).adapter
    assert adapter.invocation_tokens == (5, 6) and adapter.activation_shift == 1
