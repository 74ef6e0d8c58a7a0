"""Lookup tables, the tools of workflows, called in the format of Qwen and Hermes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NO_CALL = "this is no call of a tool you have"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class LookupTable:
    """A tool with one argument, named `key`, that returns its entry."""

    name: str
    description: str
    entries: Mapping[str, str]
    key: str = "key"

    def definition(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {self.key: {"type": "string"}}, "required": [self.key]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def look_up(self, arguments: Mapping[str, Any]) -> str:
        key = arguments.get(self.key)
        if not isinstance(key, str) or len(arguments) != 1:
            return NO_CALL
        return self._by_folded_key().get(_folded(key), f'no entry for "{key}"')

    def _by_folded_key(self) -> dict[str, str]:
        return {_folded(key): value for key, value in self.entries.items()}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return json.dumps({"name": self.name, "arguments": dict(self.arguments)}, ensure_ascii=False)

    def same_as(self, other: ToolCall) -> bool:
        return self.name == other.name and _folded_values(self.arguments) == _folded_values(other.arguments)


def find_calls(answer: str) -> list[ToolCall | None]:
    """Return the calls in order; None for an unreadable one."""
    return [_read_call(found[1]) for found in _CALL.finditer(answer)]


def run_call(call: ToolCall | None, tables: Iterable[LookupTable]) -> str:
    """Return the result as text; never raises."""
    table = next((table for table in tables if call is not None and table.name == call.name), None)
    return NO_CALL if table is None or call is None else table.look_up(call.arguments)


def _read_call(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _folded_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _folded(value) if isinstance(value, str) else value for name, value in arguments.items()}
