"""Tiny models of mlx-lm's files: built in memory, with random weights, put on the paged cache as the loader does."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from agentcache.kv.packing import LayerBits
from agentcache.models import loader
from agentcache.models.attachment import Everywhere, host
from agentcache.models.hidden_states import ModelHiddenStates
from agentcache.models.loader import LoadedModel
from agentcache.models.lora import ModelAdapters
from agentcache.models.step import CurrentStep
from agentcache.store.model_files import ModelNames

_NOISE = 0.1


def build(file: str, config: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """mlx-lm's own model in which nothing is one, zero or tied by accident."""
    module = import_module(f"mlx_lm.models.{file}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({"model_type": file, **config}))
    keys = iter(mx.random.split(mx.random.key(seed), 10_000))

    def stir(path: str, value: Any) -> Any:
        if not isinstance(value, mx.array) or not mx.issubdtype(value.dtype, mx.floating):
            return value
        stirred = value.astype(mx.float32) + _NOISE * mx.random.normal(value.shape, key=next(keys))
        return stirred.astype(dtype)

    model.update(tree_map_with_path(stir, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def load(
    file: str,
    config: dict[str, Any],
    *,
    check: bool = True,
    dtype: mx.Dtype = mx.float32,
    kv_bits: int | LayerBits = 4,
) -> LoadedModel:
    """The model on the paged cache, without a folder and a tokenizer. Raises UnsupportedModel."""
    model, current = build(file, config, dtype=dtype), CurrentStep()
    bits = kv_bits if isinstance(kv_bits, LayerBits) else LayerBits(kv_bits, kv_bits)
    hosted = host(model, file, config, check=check, choose=Everywhere(bits))
    loader.install_wanted_positions(hosted.inspection, current)
    return LoadedModel(
        model=model,
        current=current,
        adapters=ModelAdapters(model, hosted.inspection, current),
        hidden_states=ModelHiddenStates(model, hosted.inspection, current),
        tokenizer=None,  # type: ignore[arg-type]  # nothing that runs a model asks for it
        inspection=hosted.inspection,
        spec=hosted.spec,
        names=ModelNames(""),
        path=Path(),
        config=config,
        max_context=1 << 20,
    )
