"""JSON schemas as they go to llguidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentcache.models.text.json_values import parse_json, write_json

# Those that llguidance knows. Of others a schema says nothing that has to be kept to: in JSON Schema they are remarks.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # whose keys are names
_PLAIN = ("const", "enum", "default", "example", "examples")  # which hold values
# Not without end: a model that is unsure may write nothing but white space.
_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


def json_rule(definition: str, *, must_be_object: bool = False) -> str:
    """The right side of a Lark rule for JSON of a schema; `definition` is the schema's JSON text.

    Raises:
        ValueError: it is no schema, or one for something else than the object that it must be.
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
    """The schema without formats that are remarks only."""
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
    """Whether a string's `format` has to be kept to."""
    return format_ in _FORMATS if isinstance(format_, str) else format_ is not None
