"""Read adapter_config.json of mlx-lm (`mlx_lm/tuner/utils.py`) or PEFT (`peft/tuners/lora/config.py`).

Unsupported features are refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.errors import UnsupportedAdapter
from agentcache.models.plain_file import read_plain_file

CONFIG_FILE = "adapter_config.json"

_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERN = 256
_MAX_REPEATS = 3
_MAX_TOKEN_ID = 2**31
_LARGEST = 1e30  # for comparisons that NaN and integers beyond float fail too

# PEFT options that need more than x @ A @ B.
_PEFT_EXTRAS = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules saved beside the adapter",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "biases in the adapter",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "adapters of bare parameters, such as experts",
    "layer_replication": "replicated layers",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
}
# Other values (PiSSA, OLoRA, CorDA, LoftQ …) change the base weights before training.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class ExplicitScale:
    """mlx-lm's scale, for any rank."""

    rank: int
    factor: float

    def of(self, module: str, rank: int) -> float:
        """Factor on x @ A @ B of `module`; raises UnsupportedAdapter if its rank is not the config's."""
        _check_rank(module, self.rank, rank)
        return self.factor


@dataclass(frozen=True)
class AlphaScale:
    """PEFT's scale: alpha / r, or alpha / sqrt(r) if rank-stabilised (arXiv 2312.03732).

    Args:
        rank_pattern, alpha_pattern: exceptions by regular expression on a module name's end; the first match wins.
    """

    rank: int
    alpha: float
    stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def of(self, module: str, rank: int) -> float:
        """As `ExplicitScale.of`, by the trained model's name."""
        _check_rank(module, _first_match(self.rank_pattern, module, self.rank), rank)
        alpha = _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.stabilised else rank)


def _check_rank(module: str, expected: int, rank: int) -> None:
    if rank != expected:
        raise UnsupportedAdapter(f"{module} has rank {rank}, but {CONFIG_FILE} says {expected}")


def _first_match(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in pattern.items() if _expression(key).match(module)), default)


def _expression(key: str) -> re.Pattern[str]:
    """As PEFT's `get_pattern_key`: names that end with `key`, by whole components."""
    return re.compile(rf"(.*\.)?({key})$")


@dataclass(frozen=True)
class AdapterConfig:
    """Settings for serving.

    Args:
        invocation_tokens: token ids from whose last occurrence the adapter acts; None if always.
        activation_shift: offset to that start; adapters older than PEFT's rule start one later.
    """

    scale: ExplicitScale | AlphaScale
    invocation_tokens: tuple[int, ...] | None
    activation_shift: int


def read_mlx_lm_config(folder: Path) -> AdapterConfig:
    """Config of a folder of `mlx_lm.lora`; raises UnsupportedAdapter if broken, or not LoRA."""
    config = _read(folder)
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        raise UnsupportedAdapter(f"fine_tune_type {_show(kind)} is not supported, only 'lora'")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise UnsupportedAdapter(f"{CONFIG_FILE} has no lora_parameters")
    scale = ExplicitScale(_integer(parameters, "rank", low=1), _number(parameters, "scale"))
    return AdapterConfig(scale, *_activation(config))


def read_peft_config(folder: Path) -> AdapterConfig:
    """Config of a folder of PEFT's `save_pretrained`; raises the same."""
    config = _read(folder)
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedAdapter(f"peft_type {_show(kind)} is not supported, only 'LORA'")
    for field, what in _PEFT_EXTRAS.items():
        if config.get(field):
            raise UnsupportedAdapter(f"{field} is set; not supported: {what}")
    if (bias := config.get("bias") or "none") != "none":
        raise UnsupportedAdapter(f"bias {_show(bias)} is not supported, only 'none'")
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise UnsupportedAdapter(f"init_lora_weights {_show(start)} has changed the base weights, which are not served")
    scale = AlphaScale(
        rank=_integer(config, "r", low=1),
        alpha=_number(config, "lora_alpha"),
        stabilised=bool(config.get("use_rslora")),
        rank_pattern=_pattern(config, "rank_pattern", _integer),
        alpha_pattern=_pattern(config, "alpha_pattern", _number),
    )
    return AdapterConfig(scale, *_activation(config))


def _read(folder: Path) -> dict[str, Any]:
    data = read_plain_file(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise UnsupportedAdapter(f"{CONFIG_FILE} is not JSON") from None
    if not isinstance(config, dict):
        raise UnsupportedAdapter(f"{CONFIG_FILE} is not a JSON object")
    return config


def _activation(config: dict[str, Any]) -> tuple[tuple[int, ...] | None, int]:
    """PEFT's fields, accepted in mlx-lm's folders too."""
    tokens = config.get("alora_invocation_tokens")
    if tokens is not None and not _are_token_ids(tokens):
        raise UnsupportedAdapter("alora_invocation_tokens is not a list of token ids")
    shift = _integer(config, "activation_shift") if "activation_shift" in config else 0
    return None if tokens is None else tuple(tokens), shift


def _are_token_ids(tokens: object) -> bool:
    return isinstance(tokens, list) and bool(tokens) and all(type(t) is int and 0 <= t < _MAX_TOKEN_ID for t in tokens)


def _integer(config: dict[str, Any], name: str, low: int | None = None) -> int:
    value = config.get(name)
    if type(value) is not int or (low is not None and value < low):
        raise UnsupportedAdapter(f"{CONFIG_FILE}: {name} is {_show(value)}, not a whole number it could be")
    return value


def _number(config: dict[str, Any], name: str) -> float:
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _LARGEST:
        raise UnsupportedAdapter(f"{CONFIG_FILE}: {name} is {_show(value)}, not a number")
    return float(value)


def _pattern(config: dict[str, Any], name: str, read: Any) -> dict[str, Any]:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise UnsupportedAdapter(f"{CONFIG_FILE}: {name} is not an object")
    for key in pattern:
        _check_pattern(name, key)
    return {key: read(pattern, key) for key in pattern}


def _check_pattern(name: str, key: str) -> None:
    """Refuse expressions that could match for hours."""
    repeats = len(re.findall(r"[*+{]|(?<!\()\?", key))
    # Each construct with several ways to match multiplies the time.
    choices = max(key.count("("), key.count("|") // _MAX_REPEATS)
    if len(key) > _MAX_PATTERN or max(repeats, choices) > _MAX_REPEATS or re.search(r"\)[*+{?]", key):
        raise UnsupportedAdapter(f"{CONFIG_FILE}: a key of {name} is too intricate a regular expression")
    try:
        _expression(key)
    except re.error:
        raise UnsupportedAdapter(f"{CONFIG_FILE}: {_show(key)} in {name} is not a regular expression") from None


def _show(value: object) -> str:
    return f"{value!r:.60}"
