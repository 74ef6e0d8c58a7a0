"""Tools' arguments for formats with one tag or field each; other schemas become one JSON object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentcache.text.grammars.check_child import MAX_CHARACTERS
from agentcache.text.grammars.rules import Rules, escaped, has_surrogate, json_rule, literal, means_something
from agentcache.text.json_values import parse_json, write_json
from agentcache.text.replies.call_syntax import FieldSyntax
from agentcache.text.replies.calls import definition, schema_types

_REMARKS = {"title", "description", "default", "example", "examples", "deprecated", "$comment", "readOnly", "writeOnly"}
_OF_OBJECTS = _REMARKS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "strict"
}  # fmt: skip
_OF_STRINGS = _REMARKS | {"type", "minLength", "maxLength", "enum", "const", "format"}
_OF_LISTS = _REMARKS | {"type", "items", "minItems", "maxItems"}
_NAME = re.compile(r"[\w.\-]{1,100}")
_REFERS_ELSEWHERE = re.compile(r'"\$(dynamicRef|ref)": "(?!#/(\$defs|definitions)/)')
_MOST_CHARACTERS = 1000  # of strings and lists
_MOST_LITERALS = 500
_MOST_REFERENCES = 8
_NULL = "null"
_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_SCALARS = {"integer", "number", "boolean", "null"}


@dataclass(frozen=True)
class AnyText:
    """Any string."""


@dataclass(frozen=True)
class TextOfLength:
    """A string of bounded length in characters."""

    least: int
    most: int | None


@dataclass(frozen=True)
class OneOf:
    """One of some strings."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Json:
    """A non-string value as a Lark rule's right side; `parts` if nothing else constrains it."""

    rule: str
    types: frozenset[str]
    parts: ListOf | TaggedArguments | None = None


Text = AnyText | TextOfLength | OneOf


@dataclass(frozen=True)
class TaggedArgument:
    """One argument, or the word `null` if `may_be_null`."""

    name: str
    value: Text | Json
    is_required: bool
    may_be_null: bool = False


@dataclass(frozen=True)
class TaggedArguments:
    """A tool's arguments in order; `any_other` if it declares none and takes any."""

    known: tuple[TaggedArgument, ...]
    any_other: bool = False


@dataclass(frozen=True)
class ListOf:
    """A list of bounded length; the name of `item` is unused."""

    item: TaggedArgument
    least: int
    most: int | None


def tagged_arguments(source: str) -> TaggedArguments | None:
    """Convert a schema's JSON; None if arguments cannot express it."""
    root = parse_json(source)
    if root is True:
        root = {}
    if not isinstance(root, Mapping) or _repeats_much(root):
        return None
    return _of_object(root, root)


def _repeats_much(root: Mapping[str, Any]) -> bool:
    # Each argument's rule repeats the definitions.
    properties, definitions = root.get("properties"), _definitions(root)
    if not isinstance(properties, Mapping) or not definitions:
        return False
    num_referring = sum(_refers(write_json(each)) for each in properties.values())
    return num_referring > 1 and num_referring * len(write_json(definitions)) > MAX_CHARACTERS


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _refers(text: str) -> bool:
    return 'Ref": "' in text or '"$ref"' in text


def _of_object(schema: Mapping[str, Any], root: Mapping[str, Any]) -> TaggedArguments | None:
    if not schema.keys() <= _OF_OBJECTS or schema.get("type", "object") != "object":
        return None
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    others = schema.get("additionalProperties", True)
    if not isinstance(others, bool) and others != {}:
        return None
    known = [_argument(name, each, root, name in required) for name, each in properties.items()]
    if any(each is None for each in known):
        return None
    return TaggedArguments(tuple(each for each in known if each), any_other=not properties and others is not False)


def _argument(name: str, schema: Any, root: Mapping[str, Any], is_required: bool) -> TaggedArgument | None:
    meant = _meant({} if schema is True else schema, root)
    other, may_be_null = _without_null(meant, root)
    if _NAME.fullmatch(name) is None or not isinstance(other, Mapping):
        return None
    types = schema_types(other, root)
    if types and "string" not in types:
        value = _json(meant, other, root)
        return None if value is None else TaggedArgument(name, value, is_required)
    text = _string(other) if types else AnyText() if not other.keys() - _REMARKS else None
    return None if text is None else TaggedArgument(name, text, is_required, may_be_null)


def _meant(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return None
        told = schema.keys() - _REMARKS
        if told == {"$ref"} and isinstance(schema["$ref"], str):
            schema = definition(schema["$ref"], root)
        elif len(told) == 1 and told <= {"allOf", "anyOf", "oneOf"} and _is_single(schema[[*told][0]]):
            [schema] = schema[[*told][0]]
        else:
            return schema
    return None


def _is_single(alternatives: Any) -> bool:
    return isinstance(alternatives, list) and len(alternatives) == 1


def _without_null(schema: Any, root: Mapping[str, Any]) -> tuple[Any, bool]:
    if not isinstance(schema, Mapping):
        return None, False
    if isinstance(named := schema.get("type"), list) and _NULL in named and len(named) == 2 and "enum" not in schema:
        [other] = [name for name in named if name != _NULL] or [_NULL]
        return {**schema, "type": other}, True
    for key in ("anyOf", "oneOf"):
        alternatives = schema.get(key)
        if schema.keys() - _REMARKS == {key} and isinstance(alternatives, list) and len(alternatives) == 2:
            others = [each for each in alternatives if not (isinstance(each, Mapping) and each.get("type") == _NULL)]
            if len(others) == 1:
                return _meant(others[0], root), True
    return schema, False


def _string(schema: Mapping[str, Any]) -> Text | None:
    if (
        schema_types(schema, {}) != {"string"}
        or not schema.keys() <= _OF_STRINGS
        or means_something(schema.get("format"))
    ):
        return None
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if "enum" in schema or "const" in schema:
        texts = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(texts, list) or not 0 < len(texts) <= _MOST_LITERALS or least or most is not None:
            return None
        return OneOf(tuple(texts)) if all(isinstance(text, str) for text in texts) else None
    if not _is_length(least) or not (most is None or _is_length(most)):
        return None
    if not least and most is None:
        return AnyText()
    return TextOfLength(least, most) if most is None or least <= most else None


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_CHARACTERS


def _json(schema: Mapping[str, Any], other: Mapping[str, Any], root: Mapping[str, Any]) -> Json | None:
    # `other`: without null.
    text = write_json(schema)
    if _refers(text):
        text = write_json({**schema, **_definitions(root)})
    if _REFERS_ELSEWHERE.search(text) is not None:
        return None
    return Json(json_rule(text), schema_types(schema, root), _parts(other))


def _parts(schema: Mapping[str, Any]) -> ListOf | TaggedArguments | None:
    match schema.get("type"):
        case "array":
            return _of_list(schema)
        case "object":  # no root: references may be recursive
            return _of_object(schema, {})
        case _:
            return None


def _of_list(schema: Mapping[str, Any]) -> ListOf | None:
    item = _argument("item", schema.get("items", {}), {}, True)
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if item is None or not schema.keys() <= _OF_LISTS or not _is_length(least):
        return None
    return ListOf(item, least, most) if most is None or (_is_length(most) and least <= most) else None


class FieldWriter:
    def __init__(self, rules: Rules, syntax: FieldSyntax) -> None:
        self._rules = rules
        self._syntax = syntax

    def fields(self, arguments: TaggedArguments) -> str | None:
        """Return the rule of all arguments; None if fields cannot express them."""
        if arguments.any_other:
            return self._any_fields()
        rules = [self._field(argument) for argument in arguments.known]
        comma, rest, ways = literal(self._syntax.comma), "", list[str]()
        for argument, rule in reversed(list(zip(arguments.known, rules, strict=True))):
            if rule is None:
                return None
            ways = [f"{rule} {rest}", *([] if argument.is_required else ways)]
            rest = self._rules.rule(f"({comma} {rule}){'' if argument.is_required else '?'} {rest}")
        if not ways:
            return ""
        may_be_empty = not any(argument.is_required for argument in arguments.known)
        return f"({' | '.join(ways)}){'?' if may_be_empty else ''}"

    def _any_fields(self) -> str | None:
        # For Python syntax, a grammar could not forbid repeated names.
        if not self._syntax.quote:
            return None
        text = self._quoted(AnyText())
        field = self._rules.rule(f"{_ANY_NAME} {literal(self._syntax.assign)} {text}")
        return f"({field} ({literal(self._syntax.comma)} {field})*)?"

    def _field(self, argument: TaggedArgument) -> str | None:
        value = self._value(argument)
        if value is None or not self._syntax.can_name(argument.name):
            return None
        return self._rules.rule(f"{literal(argument.name + self._syntax.assign)} {value}")

    def _value(self, argument: TaggedArgument) -> str | None:
        value = argument.value
        if isinstance(value, Json):
            return self._json(value)
        if not self._syntax.quote:
            return self._rules.rule(json_rule(write_json(_schema(value, may_be_null=argument.may_be_null))))
        if isinstance(value, OneOf) and any(self._syntax.quote in text or has_surrogate(text) for text in value.texts):
            return None
        text = self._quoted(value)
        return f'({text} | "null")' if argument.may_be_null else text

    def _json(self, value: Json) -> str | None:
        if not self._syntax.quote or value.types <= _SCALARS:
            return self._rules.rule(value.rule)
        if isinstance(value.parts, ListOf):
            written = self._list(value.parts)
        else:
            fields = None if value.parts is None else self.fields(value.parts)
            written = None if fields is None else f'"{{" {fields} "}}"'
        if written is None:
            return None
        return self._rules.rule(f'{written} | "null"' if "null" in value.types else written)

    def _list(self, parts: ListOf) -> str | None:
        item = self._value(parts.item)
        if item is None:
            return None
        if parts.most == 0:
            return '"[" "]"'
        item = self._rules.rule(item)
        items = item
        if parts.most != 1:  # Lark ranges cannot end at 0
            further = f"{max(0, parts.least - 1)},{'' if parts.most is None else parts.most - 1}"
            items = f'{item} ("," {item}){{{further}}}'
        return f'"[" {items} "]"' if parts.least else f'"[" ({items})? "]"'

    def _quoted(self, value: Text) -> str:
        # The string has no quotes: the parser may stop there.
        opened, quote = self._rules.spelled(self._syntax.quote), escaped(self._syntax.quote)
        if isinstance(value, OneOf):
            text = f"({'|'.join(map(escaped, value.texts))})"
        else:
            least, most = (0, None) if isinstance(value, AnyText) else (value.least, value.most)
            text = f"(?s:.{{{least},{'' if most is None else most}}})"
        if self._syntax.quote in self._rules.ids:
            return f"{opened} {self._rules.terminal(f'/{text}/ & ~/(?s:.*){quote}(?s:.*)/')} {opened}"
        return f"{opened} {self._rules.terminal(f'/{text}{quote}/ & ~/(?s:.*){quote}(?s:.+)/')}"


def _schema(value: Text, *, may_be_null: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if isinstance(value, OneOf):
        schema = {"enum": list(value.texts)}
    elif not isinstance(value, AnyText):
        schema |= {"minLength": value.least} | ({} if value.most is None else {"maxLength": value.most})
    return {"anyOf": [schema, {"type": "null"}]} if may_be_null else schema
