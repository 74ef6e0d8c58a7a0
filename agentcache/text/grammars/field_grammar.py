"""Grammar rules for arguments as `name value` fields."""

from __future__ import annotations

from typing import Any

from agentcache.text.grammars.json_schema import json_rule
from agentcache.text.grammars.rules import Rules, escaped, has_surrogate, literal
from agentcache.text.grammars.tagged_arguments import (
    AnyText,
    Json,
    ListOf,
    OneOf,
    TaggedArgument,
    TaggedArguments,
    Text,
)
from agentcache.text.json_values import write_json
from agentcache.text.replies.call_syntax import FieldSyntax

_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_SCALARS = {"integer", "number", "boolean", "null"}


class FieldWriter:
    def __init__(self, rules: Rules, syntax: FieldSyntax) -> None:
        self._rules = rules
        self._syntax = syntax

    def fields(self, arguments: TaggedArguments) -> str | None:
        """Return the rule of all arguments without brackets; None if fields cannot express them."""
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
        """Allow string fields of any names; None for Python syntax: a grammar cannot forbid repeated names."""
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
        if parts.most != 1:  # a range of a Lark grammar cannot end at 0
            further = f"{max(0, parts.least - 1)},{'' if parts.most is None else parts.most - 1}"
            items = f'{item} ("," {item}){{{further}}}'
        return f'"[" {items} "]"' if parts.least else f'"[" ({items})? "]"'

    def _quoted(self, value: Text) -> str:
        """Return a string's rule without quotes in it: the parser may stop there."""
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
