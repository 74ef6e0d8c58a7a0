"""Base of the tool-call parsers: event sink, tool schemas, step loop."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from agentcache.text.json_values import JsonText
from agentcache.text.replies.events import Event, ToolCallArguments, ToolCallEnd, ToolCallStart

SPACE = " \t\n\r"
LONGEST_HEADER = 512  # characters up to the end of a call's name
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")


def _as_it_is(text: str) -> str:
    return text


class CallSink:
    """Collects events of calls, one at a time. `spell`, `spell_json`: decode coded text and JSON."""

    def __init__(self, spell: Callable[[str], str] = _as_it_is, spell_json: Callable[[str], str] = _as_it_is) -> None:
        self.events: list[Event] = []
        self.num_calls = 0
        self._spell = spell
        self._spell_json = spell_json

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def start(self, name: str) -> None:
        self.events.append(ToolCallStart(self.num_calls, self._spell(name)))
        self.num_calls += 1

    def arguments(self, json: str) -> None:
        if json:
            self.events.append(ToolCallArguments(self.num_calls - 1, self._spell_json(json)))

    def end(self) -> None:
        self.events.append(ToolCallEnd(self.num_calls - 1))

    def whole(self, name: str, json: str) -> None:
        self.start(name)
        self.arguments(json)
        self.end()


@dataclass(frozen=True)
class Left:
    """What a call parser leaves: text that is no call, unread text, whether a supposed call is none."""

    shown: str = ""
    rest: str = ""
    has_failed: bool = False


class CallReader(Protocol):
    """Parser for text after a marker that opens calls."""

    def feed(self, text: str, final: bool) -> Left | None:
        """Parse more text; None while calls continue. `final` ends reply and calls."""


class Tools:
    """Names and argument types of tools."""

    def __init__(self, shown: Sequence[Mapping[str, Any]] = ()) -> None:
        self.shown = shown
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in shown:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                self._parameters[function["name"]] = parameters if isinstance(parameters, Mapping) else {}

    def has(self, name: str) -> bool:
        return name in self._parameters

    def may_begin(self, name: str) -> bool:
        return any(known.startswith(name) for known in self._parameters)

    def types(self, name: str, argument: str) -> frozenset[str]:
        parameters = self._parameters.get(name, {})
        properties = parameters.get("properties")
        return schema_types(properties.get(argument) if isinstance(properties, Mapping) else None, parameters)


_TYPE_OF: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return a JSON schema's types, empty if unknown; `root` has the definitions."""
    return frozenset(_types(schema, root, set()))


def _types(schema: Any, root: Mapping[str, Any], seen: set[str], depth: int = 0) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        if reference in seen:
            return set()
        seen.add(reference)
        return _types(definition(reference, root), root, seen, depth + 1)
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    found = {each for each in names if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not found and isinstance(values, list):
        found = {_TYPE_OF[type(value)] for value in values if type(value) in _TYPE_OF}
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            found |= _types(alternative, root, seen, depth + 1)
    return found


def definition(reference: str, root: Mapping[str, Any]) -> Any:
    """Resolve a `$ref` to a definition in `root`, or None."""
    found = _DEFINITION.fullmatch(reference)
    definitions = root.get(found[1]) if found is not None else None
    return definitions.get(found[2]) if found is not None and isinstance(definitions, Mapping) else None


def partial_end(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest suffix that is a proper prefix of a string."""
    return max((_partial(text, string) for string in strings), default=0)


def _partial(text: str, string: str) -> int:
    at = max(0, len(text) - len(string) + 1)
    while string and (at := text.find(string[0], at)) >= 0:
        if string.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


class Steps(ABC):
    """Base of call parsers: `feed` repeats `_step` until nothing changes."""

    _at: Enum

    def __init__(self, sink: CallSink, close: str) -> None:
        self._sink = sink
        self._close = close
        self._text = ""  # unread
        self._raw = ""  # in case it is no call
        self._started = False

    def feed(self, text: str, final: bool) -> Left | None:
        self._text += text
        if not self._started:
            self._raw += text
        while True:
            before = len(self._text), self._at
            left = self._step(final)
            if left is not None:
                return left
            if (len(self._text), self._at) == before:
                return self._cut_off() if final else None

    @abstractmethod
    def _step(self, final: bool) -> Left | None:
        """Read a piece of `_text`."""

    @abstractmethod
    def _cut_off(self) -> Left:
        """End an open call."""

    def _failed(self) -> Left:
        return Left(shown=self._raw.removesuffix(self._text), rest=self._text, has_failed=True)

    def _read_json(self, value: JsonText) -> None:
        self._text = self._text[value.feed(self._text, 0) :]
        self._sink.arguments(value.take())

    def _end_json(self, value: JsonText) -> None:
        value.complete()
        self._sink.arguments(value.take())
        self._sink.end()

    def _behind_call(self, left_over: str) -> str:
        # `left_over`: surplus brackets, the end of a code fence.
        self._text = self._text.lstrip(SPACE + left_over)
        return self._text

    def _after(self, text: str, final: bool) -> Left | None:
        if self._close and text.startswith(self._close):
            return Left(rest=text[len(self._close) :])
        if final or (text and partial_end(text, [self._close]) != len(text)):
            return Left(rest=text)
        return None
