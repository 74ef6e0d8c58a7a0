"""Converts JSON schemas to llguidance rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentcache.text.json_values import parse_json, write_json

# Supported by llguidance. JSON Schema allows ignoring other formats.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # maps from names to schemas
_PLAIN = ("const", "enum", "default", "example", "examples")  # plain values, not schemas
# Bounded: an unsure model may write white space without end.
_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


def json_rule(definition: str, *, must_be_object: bool = False) -> str:
    """Return the right side of a Lark rule for a schema's JSON text.

    Raises:
        ValueError: not a schema, or `must_be_object` and the type is not object.
    """
    schema = parse_json(definition)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("it is not an object")
    if must_be_object:
        kinds = schema.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError("its type is not 'object'")
        schema = schema | {"type": "object"}
    text = write_json(_without_remarks(schema) | {"x-guidance": _OPTIONS})
    return "%json " + text


def _without_remarks(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_remarks(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _PLAIN:
            kept[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            kept[key] = {name: _without_remarks(each) for name, each in value.items()}
        elif key != "format" or not isinstance(value, str) or means_something(value):
            kept[key] = _without_remarks(value)
    return kept


def means_something(format_: Any) -> bool:
    """Whether a string's `format` must be enforced."""
    return format_ in _FORMATS if isinstance(format_, str) else format_ is not None
