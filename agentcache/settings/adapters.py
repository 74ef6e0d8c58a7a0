"""Adapters in settings and requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.api.policy import REFUSED_POLICIES, Policy
from agentcache.errors import ConfigError


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter to load at start."""

    name: str
    path: str
    policy: Policy = Policy.AUTO


def parse_adapters(value: Any) -> tuple[AdapterFolder, ...]:
    """Parse a mapping of names to `PATH[:POLICY]`, or a list (or comma-separated text) of `NAME=PATH[:POLICY]`.

    Raises:
        ConfigError: an invalid entry, or a duplicate name.
    """
    if isinstance(value, str):
        value = [entry for entry in value.split(",") if entry.strip()]
    if not isinstance(value, Mapping | list | tuple):
        raise ConfigError(f"adapters = {value!r:.80} must be a table of names and folders")
    pairs = value.items() if isinstance(value, Mapping) else [_name_and_path(entry) for entry in value]
    adapters = tuple(_adapter(name, path) for name, path in pairs)
    names = [adapter.name for adapter in adapters]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"adapters: {twice!r} is there twice")
    return adapters


def _name_and_path(entry: Any) -> tuple[str, str]:
    name, separator, path = str(entry).partition("=")
    if not (separator and name.strip() and path.strip()):
        raise ConfigError(f"adapters: {entry!r} is not NAME=PATH or NAME=PATH:POLICY")
    return name.strip(), path


def _adapter(name: str, value: Any) -> AdapterFolder:
    if not isinstance(value, str | Path):
        raise ConfigError(f"adapters: {name}: {value!r:.80} is not a folder")
    path = str(value).strip()
    folder, _, last = path.rpartition(":")
    if folder and last in REFUSED_POLICIES:
        raise ConfigError(f"adapters: {name}: the policy {last!r} is not supported")
    if folder and last in list(Policy):
        return AdapterFolder(name, folder, Policy(last))
    return AdapterFolder(name, path)
