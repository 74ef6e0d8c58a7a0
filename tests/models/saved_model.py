"""Tiny models written anew: with other weights, or with weights of another kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import load_model, quantize_model, save_config, save_model


def save(model: nn.Module, config: dict[str, Any], source: Path, folder: Path) -> Path:
    """Write a model with the tokenizer of the folder `source`; returns its own folder, made where it is not there."""
    folder.mkdir(exist_ok=True)
    save_model(folder, model, donate_model=True)
    save_config(config, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def quantised(source: Path, folder: Path) -> Path:
    """The model of the folder `source` with weights in 4 bits, groups of 32; returns its own folder."""
    model, config = load_model(source)
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    model, config = quantize_model(model, config, group_size=32, bits=4)
    return save(model, config, source, folder)
