"""Rules of Lark grammars, also for JSON schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentcache.text.json_values import json_string, parse_json, write_json
from agentcache.text.marks import any_of

# llguidance's; JSON Schema allows ignoring the rest.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # name to schema
_PLAIN = ("const", "enum", "default", "example", "examples")
# An unsure model may write white space without end.
_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


class Rules:
    """Rules of one grammar. `ids`: markers' token ids by name."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        self._names = any_of(ids)
        self.lines: list[str] = []

    def rule(self, source: str, attributes: str = "") -> str:
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {source}")
        return name

    def terminal(self, source: str) -> str:
        name = f"VALUE_{len(self.lines)}"
        self.lines.append(f"{name}: {source}")
        return name

    def spelled(self, text: str) -> str:
        return " ".join(map(element, self.pieces(text)))

    def pieces(self, text: str) -> Iterator[str | int]:
        done = 0
        for found in self._names.finditer(text):
            if found.start() > done:
                yield text[done : found.start()]
            yield self.ids[found[0]]
            done = found.end()
        if done < len(text):
            yield text[done:]


def element(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else literal(piece)


def literal(text: str) -> str:
    return json_string(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Escape all but ASCII letters and digits."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def json_rule(definition: str, *, must_be_object: bool = False) -> str:
    """Return a Lark rule's right side for a schema's JSON. Raises ValueError."""
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
