"""Files of a decoder: an adapter in mlx-lm's format, and training checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from agentcache.errors import ConfigError
from agentcache.models.adapter_files import CONFIG_FILE
from agentcache.system.durable import sync_path

WEIGHTS_FILE, CHECKPOINT_FILE = "adapters.safetensors", "checkpoint.safetensors"


def write_adapter(folder: Path, model: Any, matrices: Mapping[str, mx.array], scale: float) -> None:
    """Write an adapter in the format of `mlx_lm.lora`; `matrices`: `DecoderTrainer.parameters`, without the scale."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = _layers_name(model)
    modules = [name.rpartition(".")[0].partition(".") for name in matrices]
    ranks = {matrix.shape[0] for name, matrix in matrices.items() if name.endswith("lora_b")}
    (rank,) = ranks
    config = {
        "fine_tune_type": "lora",
        "num_layers": len(model.layers) - min(int(layer) for layer, _, _ in modules),
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": 0.0,
            "keys": sorted({path for _, _, path in modules}),
        },
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    _save(folder / WEIGHTS_FILE, {f"{prefix}.{name}": matrix for name, matrix in matrices.items()}, {})


def _layers_name(model: Any) -> str:
    first = next(name for name, module in model.named_modules() if module is model.layers[0])
    return str(first.rpartition(".")[0])


@dataclass(frozen=True)
class Checkpoint:
    """A training's state; resuming needs an equal `identity`, JSON data."""

    arrays: Mapping[str, mx.array]
    step: int
    identity: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"step": str(self.step), "identity": json.dumps(self.identity, sort_keys=True)}
        _save(folder / CHECKPOINT_FILE, self.arrays, metadata)


def read_checkpoint(folder: Path, identity: Mapping[str, Any]) -> Checkpoint:
    """Read a checkpoint. Raises ConfigError for another identity."""
    arrays, metadata = mx.load(str(folder / CHECKPOINT_FILE), return_metadata=True)
    theirs = json.loads(metadata["identity"])
    ours = json.loads(json.dumps(identity))
    if differences := [name for name in ours if ours[name] != theirs.get(name)]:
        raise ConfigError(f"{folder / CHECKPOINT_FILE} is of another training: {', '.join(differences)} not the same")
    return Checkpoint(arrays, int(metadata["step"]), ours)


def _save(path: Path, arrays: Mapping[str, mx.array], metadata: dict[str, str]) -> None:
    unfinished = path.with_name("next.safetensors")
    mx.save_safetensors(str(unfinished), dict(arrays), metadata)
    sync_path(unfinished)
    os.replace(unfinished, path)
    sync_path(path.parent)
