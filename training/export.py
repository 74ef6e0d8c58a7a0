from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from agentcache.models.builtin.embedded import TEXT_FILES, WEIGHTS_FILE
from agentcache.system.durable import sync_path
from training.train import Trainer


def export(trainer: Trainer, folder: Path) -> int:
    """Write config, tokenizer, template and float16 weights; return the weights' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXT_FILES:
        (folder / name).write_bytes((trainer.corpus.folder / name).read_bytes())
    _write_config(folder / "config.json", trainer.config)
    weights = {name: np.array(array.astype(mx.float16)) for name, array in tree_flatten(trainer.parameters)}
    save_file(weights, folder / "next.safetensors", metadata={"format": "mlx"})
    sync_path(folder / "next.safetensors")
    os.replace(folder / "next.safetensors", folder / WEIGHTS_FILE)
    return (folder / WEIGHTS_FILE).stat().st_size


def _write_config(path: Path, config: dict[str, Any]) -> None:
    path.write_text(json.dumps(config, indent=2) + "\n")
