"""Read adapter folders of mlx-lm or PEFT into one convention.

Plain numpy: any thread may read. Only safetensors files are opened, never pickles. Anything but plain LoRA of linear
modules is refused by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from agentcache.errors import UnreadableAdapter, UnsupportedAdapter
from agentcache.models.adapter_config import AdapterConfig, read_mlx_lm_config, read_peft_config
from agentcache.models.plain_file import open_plain_file, read_exactly

MAX_BYTES = 4 << 30
MAX_HEADER_BYTES = 16 << 20
_MOST_OBJECTS = 1 << 18  # of a header: three per tensor; each takes 20 times its bytes in memory

Array = NDArray[np.float32]

_LAYER = r"(?:(?:model|language_model)\.){0,3}layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<path>[A-Za-z0-9_.]{1,100})"
_FLOATS = {"F32": "<f4", "F16": "<f2"}
_EXPERTS = {"experts", "switch_mlp"}
# Other tensors of trainers, by a part of the name.
_OTHER_TENSORS = {
    "magnitude": "DoRA",
    "embed": "adapters of embeddings",
    "lm_head": "adapters of the output head",
    "lora_B.bias": "biases in the adapter",
    "modules_to_save": "whole modules saved beside the adapter",
}


class ModuleName(NamedTuple):
    """Such as (3, "self_attn.q_proj"); the path is inside the layer."""

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
    """Contents of a folder; `matrices` are float32 numpy arrays, by the trainer's module names."""

    path: Path
    format: str
    matrices: Mapping[ModuleName, LowRank]
    config: AdapterConfig


@dataclass(frozen=True)
class _Format:
    """One trainer's files: pattern of matrix names; `is_transposed` for [r, in] and [out, r]."""

    name: str
    file: str
    tensor: re.Pattern[str]
    is_transposed: bool
    read_config: Callable[[Path], AdapterConfig]


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


def read_folder(folder: Path, max_bytes: int = MAX_BYTES) -> AdapterFiles:
    """Read a folder, with all checks that need no model. Raises UnsupportedAdapter, without the folder's name."""
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
        raise UnsupportedAdapter(f"it holds {found[0].file} and {found[1].file}; which one counts?")
    if not found:
        names = " or ".join(style.file for style in _FORMATS)
        raise UnreadableAdapter(f"it has no {names}; other formats, such as pickles (.bin), are never opened")
    return found[0]


def _read_tensors(file: Path, max_bytes: int) -> dict[str, Array]:
    """All tensors as float32, sorted by name: a broken file always gives the same error."""
    try:
        tensors = sorted(deserialize(_read_safetensors(file, max_bytes)), key=itemgetter(0))
    except SafetensorError as error:
        raise UnsupportedAdapter(f"{file.name} is not a safetensors file: {error!s:.100}") from None
    return {name: _float32(name, tensor["dtype"], tensor["data"], tensor["shape"]) for name, tensor in tensors}


def _read_safetensors(file: Path, max_bytes: int) -> bytes:
    """The whole file, if its size agrees with the header, which may claim gigabytes."""
    with open_plain_file(file, max_bytes) as (stream, size):
        header_bytes = int.from_bytes(read_exactly(stream, min(8, size), file.name), "little")
        if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > size:
            raise UnsupportedAdapter(
                f"{file.name} is not a safetensors file: its header would pass its end or any size"
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
    return f"{_show(tensor)} is no LoRA matrix of a module in a layer"


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


def _show(name: str) -> str:
    return f"{name!r:.100}"
