"""What a new version of mlx-lm has changed of what loading, attention and text rely on."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx_lm.models import base, cache, llama, switch_layers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from agentcache import compat
from agentcache.models import fingerprint
from tests.conftest import ModelFolder
from tests.versions import check_versions

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(model_folder: ModelFolder) -> Path:
    return model_folder("llama")


def test_the_version_is_the_one_that_was_read() -> None:
    check_versions(compat.READ)


def test_no_other_module_imports_modules_of_mlx_lm() -> None:
    found = set()
    for path in (ROOT / "agentcache").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] == "mlx_lm" for name in names):
                found.add((path.name, *names))
    assert {each for each in found if each[0] != "compat.py"} == {("fingerprint.py", "mlx_lm")}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def starts_with(function: Any, *names: str) -> None:
    found = parameters(function)
    assert found[: len(names)] == list(names), f"{function.__qualname__} takes {found}"


# -- model folders ----------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_without_its_weights_being_read(folder: Path) -> None:
    starts_with(mlx_lm.utils.load_model, "model_path", "lazy")
    assert inspect.signature(mlx_lm.utils.load_model).parameters["trust_remote_code"].default is False
    model, config = compat.load_model(folder, lazy=True)
    assert isinstance(model, nn.Module) and config["model_type"] and list(model.layers)


def test_a_hub_id_is_fetched_with_the_files_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", snapshot_download)
    assert compat.download("owner/name") == tmp_path
    [(name, patterns)] = asked
    assert name == "owner/name"
    assert {"*.json", "model*.safetensors", "tokenizer.model", "*.jinja"} <= set(patterns)


def test_families_have_other_names() -> None:
    assert compat.MODEL_REMAPPING["mistral"] == "llama"
    assert all(isinstance(name, str) for pair in compat.MODEL_REMAPPING.items() for name in pair)


def test_the_definitions_that_decide_bytes_have_their_names() -> None:
    """`source_digest` reads these only: one that is renamed would no longer be part of any address."""
    for module, names in fingerprint._COUNTED.items():
        file = fingerprint._file_of(module)
        assert file is not None
        defined = {getattr(node, "name", None) for node in ast.parse(file.read_bytes()).body}
        assert names <= defined, f"{module} no longer defines {names - defined}"


# -- tokenizers -------------------------------------------------------------------------------------------------------


def test_a_tokenizer_has_its_template_and_its_parts(folder: Path) -> None:
    starts_with(mlx_lm.utils.load_tokenizer, "model_path", "tokenizer_config_extra")
    wrapper = compat.load_tokenizer(folder, {"trust_remote_code": False})
    assert isinstance(wrapper, TokenizerWrapper) and isinstance(wrapper._tokenizer, PreTrainedTokenizerBase)
    assert isinstance(wrapper.eos_token_ids, set) and wrapper.has_chat_template is True
    assert isinstance(wrapper.has_thinking, bool) and isinstance(wrapper.special_tokens_map, dict)
    assert not compat.renders_by_code(wrapper)
    assert isinstance(compat.template_data(wrapper), str)
    compat.set_template(wrapper, "{{ messages[0]['content'] }}")
    messages = [{"role": "user", "content": "hi"}]
    assert wrapper.apply_chat_template(messages, tokenize=False) == "hi"
    wrapper._chat_template = lambda *call, **others: "by code"
    assert compat.renders_by_code(wrapper)
    assert wrapper.apply_chat_template(messages, tokenize=False) == "by code"


def test_the_format_of_calls_is_the_module_of_its_parser(folder: Path) -> None:
    from mlx_lm.tool_parsers import json_tools

    wrapper = compat.load_tokenizer(folder, {"trust_remote_code": False})
    wrapper._tool_parser = json_tools.parse_tool_call
    assert compat.tool_format(wrapper) == "json_tools"
    wrapper._tool_parser = None
    assert compat.tool_format(wrapper) is None


# -- attention, caches, layers ----------------------------------------------------------------------------------------


def test_model_files_call_attention_by_a_name_of_their_own(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    expected = ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
    assert parameters(base.scaled_dot_product_attention) == expected
    monkeypatch.setattr(llama, "scaled_dot_product_attention", base.scaled_dot_product_attention)
    model, _ = compat.load_model(folder, lazy=True)
    called: list[Any] = []

    def attention(*arrays: Any, **options: Any) -> Any:
        called.append(options)
        return base.scaled_dot_product_attention(*arrays, **options)

    compat.replace_attention(model, attention)
    model(mx.zeros((1, 3), mx.int32), cache=compat.make_prompt_cache(model))
    assert len(called) == len(model.layers)
    assert all({"cache", "scale", "mask"} <= set(options) <= {"cache", "scale", "mask", "sinks"} for options in called)
    assert base.scaled_dot_product_attention is compat.scaled_dot_product_attention, "mlx-lm's own is replaced, too"


def test_caches_take_and_give_keys_and_values() -> None:
    keys = values = mx.ones((1, 2, 5, 8))
    for made in (compat.KVCache(), compat.RotatingKVCache(max_size=16)):
        assert parameters(made.update_and_fetch) == ["keys", "values"]
        fetched = made.update_and_fetch(keys, values)
        assert [array.shape for array in fetched] == [(1, 2, 5, 8)] * 2 and made.offset == 5
        assert made.make_mask(3, return_array=False, window_size=None) == "causal"
    assert compat.RotatingKVCache(max_size=16).max_size == 16
    assert compat.RotatingKVCache(max_size=16, keep=4).keep == 4
    inner = compat.KVCache()
    assert list(compat.CacheList(inner, compat.ArraysCache(1)).caches)[0] is inner
    for kind in (compat.KVCache, compat.RotatingKVCache, compat.ArraysCache, compat.CacheList):
        assert kind.__bases__ == (cache._BaseCache,), f"{kind.__name__} has another base"


def test_a_recurrent_state_is_a_list_of_arrays() -> None:
    state = compat.ArraysCache(2)
    assert state.cache == [None, None] and state.lengths is None and state.left_padding is None
    state[1] = mx.ones((1, 3))
    assert state.cache[1] is state[1] and state.make_mask(4) is None


def test_masks_cover_what_came_before() -> None:
    starts_with(base.create_causal_mask, "N", "offset", "window_size")
    assert compat.create_causal_mask(2, 1).tolist() == [[True, True, False], [True, True, True]]
    assert compat.create_causal_mask(2, 1, window_size=2).tolist() == [[True, True, False], [False, True, True]]


def test_experts_and_latents_have_the_same_calls() -> None:
    assert parameters(switch_layers.SwitchLinear.__call__) == ["self", "x", "indices", "sorted_indices"]
    experts = compat.SwitchLinear(4, 3, 2, bias=False)
    assert experts.weight.shape == (2, 3, 4)
    heads = compat.MultiLinear(4, 3, 2)
    assert parameters(compat.MultiLinear.__call__)[:3] == ["self", "x", "transpose"]
    assert heads.weight.shape == (2, 3, 4)
    packed = compat.QuantizedMultiLinear(64, 3, 2, 32, 4, "affine")
    assert parameters(compat.QuantizedMultiLinear.__call__)[:3] == ["self", "x", "transpose"]
    assert (packed.group_size, packed.bits, packed.mode) == (32, 4, "affine")
    assert issubclass(compat.DynamicNTKScalingRoPE, nn.Module)
