"""Adapter folders for tiny models, as mlx-lm and PEFT write them. Both matrices are random: an adapter always shows."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

ATTENTION = tuple(
    f"self_attn.{name}"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
)
MLP = tuple(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj"))
SHARED_EXPERTS = tuple(f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
EVERYTHING = ATTENTION + MLP + SHARED_EXPERTS
SCALE = 2.0

_WEIGHT = re.compile(r"(?P<module>.*layers\.(?P<layer>\d+)\.(?P<path>.+))\.weight")


@dataclass(frozen=True)
class Pair:
    """A module's matrices, a [in, r] and b [r, out] in float32, without the scale."""

    a: np.ndarray
    b: np.ndarray


def random_matrices(
    model: Path,
    targets: Collection[str] = EVERYTHING,
    rank: int = 3,
    layers: Collection[int] | None = None,
    seed: int = 0,
    strength: float = 0.5,
    family: int | None = None,
) -> dict[str, Pair]:
    """Matrices for those of `targets` that the model in folder `model` has, by the modules' full names.

    Args:
        layers: the layers to adapt; all if None.
        strength: size of what the adapter adds, beside 1 for what the module itself gives.
        family: seed of the As, where they are those of other adapters too.
    """
    rng = np.random.default_rng(seed)
    rng_of_a = rng if family is None else np.random.default_rng(family)
    pairs = {}
    for name, (out_dim, in_dim) in sorted(linear_shapes(model).items()):
        match = _WEIGHT.fullmatch(name + ".weight")
        if match and match["path"] in targets and (layers is None or int(match["layer"]) in layers):
            a = rng_of_a.standard_normal((in_dim, rank)) / np.sqrt(in_dim)
            b = rng.standard_normal((rank, out_dim)) * strength / SCALE / np.sqrt(rank)
            pairs[name] = Pair(a.astype(np.float32), b.astype(np.float32))
    return pairs


def linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """[out, in] of every matrix in a layer of an unquantised model, by module name."""
    with safe_open(model / "model.safetensors", framework="numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys() if _WEIGHT.fullmatch(name)}  # noqa: SIM118
    return {name.removesuffix(".weight"): (s[0], s[1]) for name, s in shapes.items() if len(s) == 2}


def write_mlx_lm(folder: Path, pairs: Mapping[str, Pair], scale: float = SCALE, **config: Any) -> Path:
    """A folder as `mlx_lm.lora` leaves it; returns it. `config` overrides entries of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.lora_a": pair.a for name, pair in pairs.items()}
    tensors |= {f"{name}.lora_b": pair.b for name, pair in pairs.items()}
    save_file(tensors, folder / "adapters.safetensors")
    matches = [_WEIGHT.fullmatch(name + ".weight") for name in pairs]
    keys = sorted({match["path"] for match in matches if match})
    parameters = {"rank": rank_of(pairs), "scale": scale, "dropout": 0.0, "keys": keys}
    # mlx-lm adapts the last layers: with more than the model has, all.
    return write_config(folder, {"fine_tune_type": "lora", "num_layers": 99, "lora_parameters": parameters} | config)


def write_peft(folder: Path, pairs: Mapping[str, Pair], scale: float = SCALE, **config: Any) -> Path:
    """A folder as PEFT's `save_pretrained` leaves it; returns it. `config` overrides entries of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "base_model.model."
    tensors = {f"{prefix}{name}.lora_A.weight": np.ascontiguousarray(pair.a.T) for name, pair in pairs.items()}
    tensors |= {f"{prefix}{name}.lora_B.weight": np.ascontiguousarray(pair.b.T) for name, pair in pairs.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    rank = rank_of(pairs)
    entries = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": scale * rank,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
    }
    return write_config(folder, entries | config)


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """adapter_config.json of `folder`; returns the folder."""
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def rank_of(pairs: Mapping[str, Pair]) -> int:
    """The first module's rank: that of all where no pattern says otherwise."""
    return next(iter(pairs.values())).b.shape[0]


def make_adapter(folder: Path, model: Path, *, writer: Any = write_mlx_lm, config: Any = None, **matrices: Any) -> Path:
    """`random_matrices(model, **matrices)` in a folder that `writer` writes, with `config` in adapter_config.json."""
    return Path(writer(folder, random_matrices(model, **matrices), **(config or {})))
