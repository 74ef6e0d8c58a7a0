"""What a model's authors say of its generation: the tokens that end it, and how to sample.

Models published for chat often end a turn by a token that only generation_config.json names (Gemma's <end_of_turn>,
Llama 3.1's <|eom_id|>), and are made for other values than a temperature of 1.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentcache.errors import InvalidRequest
from agentcache.sampling import SamplingDefaults

_FILE, _MODEL_FILE = "generation_config.json", "config.json"
_MAX_BYTES = 16 << 20

log = logging.getLogger("agentcache.models")


def end_tokens(folder: Path) -> frozenset[int]:
    """Every token id that config.json (also its text part) or generation_config.json names as `eos_token_id`."""
    config = read_object(folder / _MODEL_FILE)
    holders = (config, config.get("text_config"), read_object(folder / _FILE))
    return frozenset(token for holder in holders if isinstance(holder, Mapping) for token in _ids(holder))


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """The sampling values of generation_config.json. A value that cannot be used is left out, with a log line."""
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
        values = {"temperature": 0.0}  # the authors' other values are for sampling
    return SamplingDefaults(**values)


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing or holds none."""
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
