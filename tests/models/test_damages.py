"""Whatever a model folder holds, it is loaded or refused with `UnsupportedModel`: 200 random damages."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentcache.errors import UnsupportedModel
from agentcache.models import loader
from tests.conftest import ModelFolder

ARCHITECTURES = ("llama", "gemma3_text", "deepseek_v2", "gpt_oss", "qwen3_moe")
FEW = 15
# Not so many layers or values that memory would be the limit, which is another matter.
VALUES: list[Any] = [
    None,
    0,
    1,
    -1,
    3,
    7,
    40,
    0.5,
    float("nan"),
    "",
    "x",
    "llama",
    True,
    [],
    [1, "a"],
    {},
    {"type": "su"},
]
MODEL_TYPES = ("mamba2", "gemma2", "qwen3_5", "olmo", "deepseek_v3", "lfm2", "phi3", "../llama", "gpt2", "bitnet")


def change_entry(folder: Path, rng: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    config[rng.choice(sorted(config))] = rng.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(config))


def remove_entry(folder: Path, rng: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config[rng.choice(sorted(config))]
    (folder / "config.json").write_text(json.dumps(config))


def change_type(folder: Path, rng: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": rng.choice(MODEL_TYPES)}))


def change_tensor(folder: Path, rng: random.Random) -> None:
    weights = load_file(folder / "model.safetensors")
    name = rng.choice(sorted(weights))
    tensor = weights.pop(name)
    match rng.randrange(5):
        case 0:
            weights[name] = tensor[..., : max(1, tensor.shape[-1] // 2)].copy()
        case 1:
            weights[name + ".x"] = tensor
        case 2:
            weights[name] = np.full_like(tensor, np.nan)
        case 3:
            weights[name] = tensor.astype(rng.choice([np.int32, np.float16, np.uint8]))
        case _:
            pass  # it is gone
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})


def change_bytes(folder: Path, rng: random.Random) -> None:
    file = folder / rng.choice(["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
    content = bytearray(file.read_bytes())
    for _ in range(rng.randrange(1, 20)):
        content[rng.randrange(min(len(content), 4000))] = rng.randrange(256)
    file.write_bytes(content[: rng.choice([len(content), len(content), len(content) // 2, 10])])


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    change_entry,
    change_entry,
    remove_entry,
    change_type,
    change_tensor,
    change_bytes,
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "seed", [seed if seed < FEW else pytest.param(seed, marks=pytest.mark.slow) for seed in range(200)]
)
def test_a_damaged_folder_is_loaded_or_refused(model_folder: ModelFolder, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    source = model_folder(ARCHITECTURES[seed % len(ARCHITECTURES)], num_hidden_layers=2)
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    rng.choice(DAMAGES)(folder, rng)
    try:
        loader.load(str(folder), kv="4t")
    except UnsupportedModel as error:
        assert str(error)
