"""Adapter folders of both formats with made-up modules, and ways to break them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.adapters_factory import Pair, write_mlx_lm, write_peft

IN, OUT, RANK = 12, 10, 3
SCALE = 1.7
TENSORS = {"mlx-lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}
WRITERS: dict[str, Any] = {"mlx-lm": write_mlx_lm, "peft": write_peft}


def pairs(rank: int = RANK, *names: str) -> dict[str, Pair]:
    rng = np.random.default_rng(rank)
    shapes = (IN, rank), (rank, OUT)
    modules = names or ("model.layers.1.self_attn.q_proj", "model.layers.3.mlp.up_proj")
    return {name: Pair(*(rng.standard_normal(shape).astype(np.float32) for shape in shapes)) for name in modules}


def style_of(folder: Path) -> str:
    return next(style for style, file in TENSORS.items() if (folder / file).exists())


def edit_config(folder: Path, **entries: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    file = folder / TENSORS[style_of(folder)]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
