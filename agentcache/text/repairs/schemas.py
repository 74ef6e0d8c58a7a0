"""Rewrites tool schemas with JSON Schema keywords that every chat template knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentcache.text.json_values import write_json
from agentcache.text.repairs.kinds import Work

_MOST_OBJECTS = 5_000  # expanded references may grow exponentially
_ALTERNATIVES = {"anyOf", "oneOf", "allOf"}
_UNSAID = ("$defs", "definitions", "$schema", "$id")

Schema = dict[str, Any]


class _TooLarge(Exception):
    """The expanded schema is too large."""


def plain_schemas(work: Work) -> None:
    if not work.repairs.plain_schemas or not work.tools:
        return
    plain = [_with_plain_schema(tool, work.repairs.describe_enums) for tool in work.tools]
    if plain != work.tools:
        work.note("tools: references, nullable types and constants in schemas are told in plainer words")
    work.tools = plain


def _with_plain_schema(tool: Mapping[str, Any], describes_enums: bool) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("parameters"), Mapping):
        return dict(tool)
    return {**tool, "function": {**function, "parameters": plain_schema(function["parameters"], describes_enums)}}


def plain_schema(schema: Mapping[str, Any], describes_enums: bool = False) -> Schema:
    """Expand references and give each value one type; return `schema` if that is too large.

    Recursive references become plain objects, constants enumerations; null entries are dropped.
    """
    try:
        return _Writer(schema, describes_enums).plain(schema, frozenset())
    except (_TooLarge, RecursionError):
        return dict(schema)


class _Writer:
    def __init__(self, root: Mapping[str, Any], describes_enums: bool) -> None:
        self._root, self._describes_enums = root, describes_enums
        self._left = _MOST_OBJECTS

    def plain(self, given: Mapping[str, Any], within: frozenset[str]) -> Schema:
        self._left -= 1
        if self._left < 0:
            raise _TooLarge
        schema = {name: value for name, value in given.items() if value is not None and name not in _UNSAID}
        ref = schema.pop("$ref", None)
        if isinstance(ref, str):
            target = None if ref in within else self._target(ref)
            schema = {**({"type": "object"} if target is None else target), **schema}
            return self.plain(schema, within | {ref})
        for name in sorted(_ALTERNATIVES):
            others = [each for each in _mappings(schema.get(name)) if each.get("type") != "null"]
            if len(others) == 1:
                del schema[name]
                return self.plain({**others[0], **schema}, within)
            if name in schema:
                schema[name] = [self.plain(each, within) for each in others]
        schema = _typed(schema)
        if self._describes_enums and isinstance(values := schema.get("enum"), list):
            said = schema.get("description")
            told = f"One of: {', '.join(write_json(value, ensure_ascii=False) for value in values)}"
            schema["description"] = f"{said} {told}" if said else told
        return self._with_parts(schema, within)

    def _with_parts(self, schema: Schema, within: frozenset[str]) -> Schema:
        if "properties" in schema:
            properties = schema["properties"] if isinstance(schema["properties"], Mapping) else {}
            schema["properties"] = {name: self._part(each, within) for name, each in properties.items()}
        if isinstance(items := schema.get("items"), Sequence) and not isinstance(items, str):
            schema["items"] = next(iter(items), {})
        for name in ("items", "additionalProperties"):
            if isinstance(schema.get(name), Mapping):
                schema[name] = self.plain(schema[name], within)
        if not isinstance(schema.get("required", []), list):
            del schema["required"]
        return schema

    def _part(self, value: Any, within: frozenset[str]) -> Schema:
        return self.plain(value, within) if isinstance(value, Mapping) else {}

    def _target(self, ref: str) -> Mapping[str, Any] | None:
        if not ref.startswith("#"):
            return None
        found: Any = self._root
        for step in filter(None, ref[1:].split("/")):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else None


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _typed(schema: Schema) -> Schema:
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    kind = schema.get("type")
    if isinstance(kind, list):
        schema["type"] = next((each for each in kind if each != "null"), "null")
    elif kind is None and not schema.keys() & _ALTERNATIVES:
        values = schema.get("enum")
        is_number = isinstance(values, list) and values and not isinstance(values[0], str)
        parts = {"properties": "object", "items": "array"}
        schema["type"] = next((parts[name] for name in parts if name in schema), "number" if is_number else "string")
    return schema
