"""Read LoRA folders of mlx-lm or PEFT, on any thread; pickles are never opened."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from agentcache.errors import UnreadableAdapter, UnsupportedAdapter
from agentcache.system.files import open_plain

MAX_BYTES = 4 << 30
MAX_HEADER_BYTES = 16 << 20
_MOST_OBJECTS = 1 << 18  # of a header; each takes 20 times its bytes in memory
Array = NDArray[np.float32]
_LAYER = r"(?:(?:model|language_model)\.){0,3}layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<path>[A-Za-z0-9_.]{1,100})"
_FLOATS = {"F32": "<f4", "F16": "<f2"}
_EXPERTS = {"experts", "switch_mlp"}
_OTHER_TENSORS = {
    "magnitude": "DoRA",
    "embed": "adapters of embeddings",
    "lm_head": "adapters of the output head",
    "lora_B.bias": "biases in the adapter",
    "modules_to_save": "whole modules saved beside the adapter",
}
CONFIG_FILE = "adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERN = 256
_MAX_REPEATS = 3
_MAX_TOKEN_ID = 2**31
_LARGEST = 1e30  # NaN and integers beyond float fail, too
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
# PiSSA, LoftQ … change the base weights before training.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


class ModuleName(NamedTuple):
    """A module of a layer, such as (3, "self_attn.q_proj")."""

    layer: int
    path: str

    def __str__(self) -> str:
        return f"layers.{self.layer}.{self.path}"


@dataclass(frozen=True)
class LowRank:
    """Addition x @ a @ b to a linear module: a [in, r], b [r, out] with the scale; numpy or MLX arrays."""

    a: Any
    b: Any

    @property
    def rank(self) -> int:
        return int(self.b.shape[0])


@dataclass(frozen=True)
class AdapterFiles:
    """Contents of a folder: float32 numpy matrices by the trainer's module names."""

    path: Path
    format: str
    matrices: Mapping[ModuleName, LowRank]
    config: AdapterConfig


@dataclass(frozen=True)
class _Format:
    name: str
    file: str
    tensor: re.Pattern[str]
    is_transposed: bool
    read_config: Callable[[Path], AdapterConfig]


def read_folder(folder: Path, max_bytes: int = MAX_BYTES) -> AdapterFiles:
    """Read and check a folder. Raises UnsupportedAdapter."""
    style = _format_of(folder)
    config = style.read_config(folder)
    tensors = _read_tensors(folder / style.file, max_bytes)
    matrices = {name: _pair(name, sides, style, config) for name, sides in _by_module(tensors, style).items()}
    return AdapterFiles(folder, style.name, matrices, config)


def _format_of(folder: Path) -> _Format:
    if not os.path.isdir(folder):
        raise UnreadableAdapter("there is no such folder")
    found = [style for style in _FORMATS if os.path.isfile(folder / style.file)]
    if len(found) == 2:
        raise UnsupportedAdapter(f"it holds {found[0].file} and {found[1].file}; keep one of them")
    if not found:
        names = " or ".join(style.file for style in _FORMATS)
        raise UnreadableAdapter(f"it has no {names}; other formats, such as pickles (.bin), are never opened")
    return found[0]


def _read_tensors(file: Path, max_bytes: int) -> dict[str, Array]:
    try:
        # Sorted: a broken file always gives the same error.
        tensors = sorted(deserialize(_read_safetensors(file, max_bytes)), key=itemgetter(0))
    except SafetensorError as error:
        raise UnsupportedAdapter(f"{file.name} is not a safetensors file: {error!s:.100}") from None
    return {name: _float32(name, tensor["dtype"], tensor["data"], tensor["shape"]) for name, tensor in tensors}


def _read_safetensors(file: Path, max_bytes: int) -> bytes:
    with open_plain_file(file, max_bytes) as (stream, size):
        # First the size: a header may claim gigabytes.
        header_bytes = int.from_bytes(read_exactly(stream, min(8, size), file.name), "little")
        if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > size:
            raise UnsupportedAdapter(
                f"{file.name} is not a safetensors file: its header is longer than the file, or than the limit"
            )
        stated = 8 + header_bytes + _data_bytes(read_exactly(stream, header_bytes, file.name), file.name)
        if stated != size:
            raise UnsupportedAdapter(f"{file.name} is not a safetensors file: it has {size} bytes, not {stated}")
        stream.seek(0)
        return read_exactly(stream, size, file.name)


def _data_bytes(header: bytes, name: str) -> int:
    if header.count(b"[") + header.count(b"{") > _MOST_OBJECTS:
        raise UnsupportedAdapter(f"{name} is not a safetensors file: its header has too many entries")
    try:
        entries = [entry for key, entry in json.loads(header).items() if key != "__metadata__"]
        return max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedAdapter(f"{name} is not a safetensors file: {error!r:.100}") from None


def _float32(name: str, dtype: str, data: bytes, shape: list[int]) -> Array:
    if dtype == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif dtype in _FLOATS:
        values = np.frombuffer(data, _FLOATS[dtype]).astype("<f4")
    else:
        raise UnsupportedAdapter(f"{_show(name)} holds {dtype}, not F32, F16 or BF16")
    return values.reshape(shape)


@dataclass
class _Sides:
    module: str
    a: Array | None = None
    b: Array | None = None


def _by_module(tensors: Mapping[str, Array], style: _Format) -> dict[ModuleName, _Sides]:
    modules: dict[ModuleName, _Sides] = {}
    for tensor, values in tensors.items():
        match = style.tensor.fullmatch(tensor)
        if match is None:
            raise UnsupportedAdapter(_unknown(tensor))
        name = ModuleName(int(match["layer"]), match["path"])
        if _EXPERTS & set(name.path.split(".")):
            raise UnsupportedAdapter(f"{name}: adapters of experts are not supported")
        sides = modules.setdefault(name, _Sides(match["module"]))
        if sides.module != match["module"]:
            raise UnsupportedAdapter(f"{_show(sides.module)} and {_show(match['module'])} would be the same module")
        setattr(sides, match["side"].lower(), values.T if style.is_transposed else values)
    if not modules:
        raise UnsupportedAdapter(f"{style.file} holds no matrices")
    return modules


def _unknown(tensor: str) -> str:
    what = next((what for part, what in _OTHER_TENSORS.items() if part in tensor), None)
    if what is None and tensor.endswith(".m"):
        what = "DoRA"  # mlx-lm's name
    if what is not None:
        return f"{_show(tensor)}: {what} are not supported"
    return f"{_show(tensor)} is not a LoRA matrix of a module in a layer"


def _pair(name: ModuleName, sides: _Sides, style: _Format, config: AdapterConfig) -> LowRank:
    a, b = sides.a, sides.b
    if a is None or b is None:
        raise UnsupportedAdapter(f"{name} has only one of its two matrices")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or not a.size or not b.size:
        raise UnsupportedAdapter(f"{name}: shapes {a.shape} and {b.shape} (as [in, r] and [r, out]) do not fit")
    factor = config.scale.of(sides.module, b.shape[0])
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (b * np.float64(factor)).astype("<f4")
    if not (np.isfinite(a).all() and np.isfinite(scaled).all()):
        raise UnsupportedAdapter(f"{name} holds values that are not finite")
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(scaled))


def _show(value: object) -> str:
    return f"{value!r:.100}"


@dataclass(frozen=True)
class ExplicitScale:
    """mlx-lm's scale."""

    rank: int
    factor: float

    def of(self, module: str, rank: int) -> float:
        """Factor on x @ A @ B. Raises UnsupportedAdapter."""
        _check_rank(module, self.rank, rank)
        return self.factor


@dataclass(frozen=True)
class AlphaScale:
    """PEFT's scale: alpha / r, or alpha / sqrt(r) if stabilised (arXiv 2312.03732); patterns match names' ends."""

    rank: int
    alpha: float
    stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def of(self, module: str, rank: int) -> float:
        _check_rank(module, _first_match(self.rank_pattern, module, self.rank), rank)
        alpha = _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.stabilised else rank)


def _check_rank(module: str, expected: int, rank: int) -> None:
    if rank != expected:
        raise UnsupportedAdapter(f"{module} has rank {rank}, but {CONFIG_FILE} says {expected}")


def _first_match(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in pattern.items() if _expression(key).match(module)), default)


def _expression(key: str) -> re.Pattern[str]:
    """As PEFT's `get_pattern_key`."""
    return re.compile(rf"(.*\.)?({key})$")


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of an adapter, which acts from the last `invocation_tokens`, or always if None.

    `activation_shift` is added: adapters older than PEFT's rule start one token later.
    """

    scale: ExplicitScale | AlphaScale
    invocation_tokens: tuple[int, ...] | None
    activation_shift: int


def read_mlx_lm_config(folder: Path) -> AdapterConfig:
    """Config of `mlx_lm.lora` (`mlx_lm/tuner/utils.py`). Raises UnsupportedAdapter."""
    config = _read(folder)
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        raise UnsupportedAdapter(f"fine_tune_type {_show(kind)} is not supported, only 'lora'")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise UnsupportedAdapter(f"{CONFIG_FILE} has no lora_parameters")
    scale = ExplicitScale(_integer(parameters, "rank", low=1), _number(parameters, "scale"))
    return AdapterConfig(scale, *_activation(config))


def read_peft_config(folder: Path) -> AdapterConfig:
    """Config of PEFT (`peft/tuners/lora/config.py`). Raises UnsupportedAdapter."""
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
        raise UnsupportedAdapter(f"{CONFIG_FILE}: {name} is {_show(value)}, not a valid integer")
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
    choices = max(key.count("("), key.count("|") // _MAX_REPEATS)
    if len(key) > _MAX_PATTERN or max(repeats, choices) > _MAX_REPEATS or re.search(r"\)[*+{?]", key):
        raise UnsupportedAdapter(f"{CONFIG_FILE}: a key of {name} is too complex a regular expression")
    try:
        _expression(key)
    except re.error:
        raise UnsupportedAdapter(f"{CONFIG_FILE}: {_show(key)} in {name} is not a regular expression") from None


@contextmanager
def open_plain_file(path: Path, max_bytes: int) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file, or a link to one, with its size.

    Raises UnreadableAdapter, also within the context; UnsupportedAdapter beyond `max_bytes`.
    """
    try:
        with open(_open(path), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise UnsupportedAdapter(f"{path.name} is larger than {max_bytes} bytes")
            yield stream, size
    except OSError as error:
        raise UnreadableAdapter(f"{path.name} cannot be read: {error.strerror}") from None


def _open(path: Path) -> int:
    try:
        return open_plain(path)
    except ValueError:
        raise UnreadableAdapter(f"{path.name} is not a file") from None


def read_plain_file(path: Path, max_bytes: int) -> bytes:
    """Read a file whole; errors as `open_plain_file`."""
    with open_plain_file(path, max_bytes) as (stream, size):
        return read_exactly(stream, size, path.name)


def read_exactly(stream: BinaryIO, size: int, name: str) -> bytes:
    """Read `size` bytes. Raises UnreadableAdapter if there are fewer."""
    data = stream.read(size)
    if len(data) < size:
        raise UnreadableAdapter(f"{name} is being changed")
    return data


_FORMATS = (
    _Format(
        "mlx-lm",
        "adapters.safetensors",
        re.compile(rf"(?P<module>{_LAYER})\.lora_(?P<side>[ab])"),
        is_transposed=False,
        read_config=read_mlx_lm_config,
    ),
    _Format(
        "peft",
        "adapter_model.safetensors",
        re.compile(rf"base_model\.model\.(?P<module>{_LAYER})\.lora_(?P<side>[AB])\.weight"),
        is_transposed=True,
        read_config=read_peft_config,
    ),
)
