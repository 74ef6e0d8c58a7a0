"""End tokens and sampling defaults from a model's generation_config.json.

Often only this file names a chat model's end token (Gemma's <end_of_turn>, Llama 3.1's <|eom_id|>).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentcache.api.sampling import SamplingDefaults
from agentcache.errors import InvalidRequest

_FILE, _MODEL_FILE = "generation_config.json", "config.json"
_MAX_BYTES = 16 << 20

log = logging.getLogger("agentcache.models")


def end_tokens(folder: Path) -> frozenset[int]:
    """Return each `eos_token_id` of config.json (also `text_config`) and generation_config.json."""
    config = read_object(folder / _MODEL_FILE)
    holders = (config, config.get("text_config"), read_object(folder / _FILE))
    return frozenset(token for holder in holders if isinstance(holder, Mapping) for token in _ids(holder))


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the sampling values of generation_config.json; log and skip invalid ones."""
    found = read_object(folder / _FILE)
    values: dict[str, Any] = {}
    for name in SamplingDefaults.NAMES:
        if (value := found.get(name)) is not None:
            try:
                SamplingDefaults(**{name: value})
            except InvalidRequest as error:
                log.warning("%s is not used: %s", folder / _FILE, error)
            else:
                values[name] = value
    if found.get("do_sample") is False:
        values = {"temperature": 0.0}  # the other values are for sampling
    return SamplingDefaults(**values)


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing or invalid."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            return {}
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _ids(holder: Mapping[str, Any]) -> Iterator[int]:
    named = holder.get("eos_token_id")
    for token in named if isinstance(named, list) else [named]:
        if type(token) is int and token >= 0:
            yield token
