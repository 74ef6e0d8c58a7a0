"""Reads parsed TOML strictly. Every error is a `ConfigError` that names its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from agentcache.api.names import is_name
from agentcache.errors import ConfigError

Kind = type | tuple[type, ...]


def read_table(
    table: Any, where: str, *, required: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None
) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, not {_type_name(type(table))}")
    kinds = {**required, **(optional or {})}
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f'{where}: unknown key "{key}"{hint(key, kinds)}')
        _check_kind(value, kinds[key], f'{where}: key "{key}"')
    for key in required:
        if key not in table:
            raise ConfigError(f'{where}: key "{key}" is missing')
    return table


def read_words(values: Any, where: str) -> list[str]:
    """Return a list of distinct, non-empty strings."""
    if not isinstance(values, list):
        raise ConfigError(f"{where} must be a list, not {_type_name(type(values))}")
    for value in values:
        _check_kind(value, str, f"{where}: each of the list")
        if not value.strip():
            raise ConfigError(f"{where} holds an empty string")
    check_unique(values, where)
    return values


def read_strings(table: Any, where: str) -> dict[str, str]:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, not {_type_name(type(table))}")
    for key, value in table.items():
        _check_kind(value, str, f'{where}: key "{key}"')
    return table


def read_count(values: Mapping[str, Any], key: str, where: str) -> int | None:
    """Return an integer of at least 1; None without the key."""
    value: int | None = values.get(key)
    if value is not None and value < 1:
        raise ConfigError(f'{where}: key "{key}" is {value}; it must be 1 or more')
    return value


def check_id(value: str, where: str) -> None:
    if not is_name(value):
        raise ConfigError(f'{where} is "{value}"; allowed are 1 to 64 of A-Z a-z 0-9 . _ -')


def check_unique(values: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f'{where}: "{value}" is there twice')
        seen.add(value)


def check_known(value: Any, known: Iterable[str], what: str, where: str) -> str:
    names = list(known)
    if value not in names:
        there = f"{what}s are {', '.join(names)}" if names else f"there are no {what}s"
        raise ConfigError(f'{where} names the unknown {what} "{value}"{hint(value, names)}; {there}')
    return str(value)


def hint(word: Any, known: Iterable[str]) -> str:
    """Return ` (did you mean "…"?)` or an empty text."""
    nearest = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f' (did you mean "{nearest[0]}"?)' if nearest else ""


def place_of(what: str, number: int, entry: Any, key: str) -> str:
    """Return a place such as `phase 2 ("night")`."""
    label = entry.get(key) if isinstance(entry, dict) else None
    return f'{what} {number} ("{label}")' if isinstance(label, str) else f"{what} {number}"


def _check_kind(value: Any, kind: Kind, where: str) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    accepted = (*kinds, int) if float in kinds else kinds
    if isinstance(value, bool) or not isinstance(value, accepted):
        wanted = " or ".join(_type_name(each) for each in kinds)
        raise ConfigError(f"{where} must be {wanted}, not {_type_name(type(value))}")


def _type_name(kind: type) -> str:
    names = {str: "a string", int: "a whole number", float: "a number", list: "a list", dict: "a table"}
    return names.get(kind, kind.__name__)
