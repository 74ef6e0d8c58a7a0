"""Undocumented interfaces of mlx-lm; the rest of the package takes them from here.

`READ` is the version whose source was read; `tests/test_compat.py` shows what another one has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import MODEL_REMAPPING, _download, load_model, load_tokenizer
from transformers import PreTrainedTokenizerBase

READ = {"mlx-lm": "0.32.2"}
__all__ = [
    # Model folders. `load_model` does not fetch, and reads weights lazily, unlike `mlx_lm.load`.
    "MODEL_REMAPPING", "load_model", "load_tokenizer", "TokenizerWrapper",
    # Caches. Recurrent layers run on `ArraysCache`.
    "ArraysCache", "CacheList", "KVCache", "RotatingKVCache", "make_prompt_cache", "create_causal_mask",
    "DynamicNTKScalingRoPE", "MultiLinear", "QuantizedMultiLinear", "SwitchLinear", "scaled_dot_product_attention",
]  # fmt: skip
_NAME, _BASE = scaled_dot_product_attention.__name__, scaled_dot_product_attention.__module__


def download(hub_id: str) -> Path:
    """Folder of a Hugging Face model, with what mlx-lm reads; fetched once."""
    return Path(_download(hub_id))


def replace_attention(
    model: nn.Module, attention: Callable[..., Any], replaced: Callable[..., Any] = scaled_dot_product_attention
) -> None:
    """Replace mlx-lm's attention in the files of `model`'s modules, each of which has imported the name.

    Atomic for threads that run another model; `attention` must treat arrays as the original does.
    """
    for file in _files(model):
        if getattr(file, _NAME, None) is replaced:
            setattr(file, _NAME, attention)


def _files(model: nn.Module) -> list[ModuleType]:
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__} - {_BASE}
    return [sys.modules[name] for name in names if name in sys.modules]


def renders_by_code(wrapper: TokenizerWrapper) -> bool:
    """Whether the chat template is Python code of mlx-lm or transformers, not data of the model's folder."""
    method = type(wrapper._tokenizer).apply_chat_template
    return wrapper._chat_template is not None or method is not PreTrainedTokenizerBase.apply_chat_template


def template_data(wrapper: TokenizerWrapper) -> Any:
    """The chat template: a text, texts by name, or None."""
    return wrapper._tokenizer.chat_template


def set_template(wrapper: TokenizerWrapper, template: str | Mapping[str, str]) -> None:
    """Set a chat template that transformers has not found."""
    wrapper._tokenizer.chat_template = template
    wrapper.has_chat_template = True


def tool_format(wrapper: TokenizerWrapper) -> str | None:
    """mlx-lm's name of the template's tool-call format: its parser's module."""
    parser = getattr(wrapper, "tool_parser", None)
    return None if parser is None else parser.__module__.rpartition(".")[2]
