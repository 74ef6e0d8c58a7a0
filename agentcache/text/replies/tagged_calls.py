"""Streaming parser for calls with a tag for each argument."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from agentcache.text.json_values import MAX_REPLY_DEPTH, JsonText, json_string, parse_json, write_json, written_and_read
from agentcache.text.replies.calls import LONGEST_HEADER, SPACE, CallSink, Left, Steps, Tools, partial_end
from agentcache.text.replies.json_calls import ObjectCalls

_MAX_DEPTH = MAX_REPLY_DEPTH - 1
_LONGEST_LITERAL = 10_000
_NAME_ATTRIBUTE = re.compile(r'(?:name|tool|key)\s*=\s*(?:"([^"]*)"|\'([^\']*)\'|([^\s"\'>]+))')
_TYPE_ATTRIBUTE = re.compile(r'\btype\s*=\s*"([^"]*)"')
_STRING_ATTRIBUTE = re.compile(r'\bstring\s*=\s*"(true|false)"')
_NAME = re.compile(r"[\w.:/\-]+")
_CDATA, _CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True)
class Tags:
    """Tags of a call format.

    Args:
        name_end: if empty, the next tag or line break ends the name.
        call_end: if empty, the closing marker of all calls ends one.
        on_lines: strip one line break around a value; else white space, except from strings.
    """

    call: str
    name_end: str
    argument: str
    argument_end: str
    value: str
    value_end: str
    call_end: str
    on_lines: bool = False
    untyped: bool = False
    cdata: bool = False

    def coded(self, code: Callable[[str], str]) -> Tags:
        return Tags(
            code(self.call),
            code(self.name_end),
            code(self.argument),
            code(self.argument_end),
            code(self.value),
            code(self.value_end),
            code(self.call_end),
            self.on_lines,
            self.untyped,
            self.cdata,
        )


class _At(Enum):
    CALL = auto()
    NAME = auto()
    ARGUMENTS = auto()
    KEY = auto()
    VALUE = auto()
    IN_VALUE = auto()
    BEHIND_VALUE = auto()
    JSON = auto()
    END = auto()
    OBJECTS = auto()


class TaggedCalls(Steps):
    """Parses tagged calls up to `close`, if any. Streams only string arguments."""

    _at: _At

    def __init__(self, sink: CallSink, close: str, tools: Tools, tags: Tags) -> None:
        super().__init__(sink, close)
        self._tools = tools
        self._tags = tags
        self._objects = ObjectCalls(sink, close, tools)
        self._at = _At.CALL
        self._any = False
        self._begin("")

    def _begin(self, name: str) -> None:
        self._name = name
        self._num_arguments = 0
        self._key = ""
        self._types: frozenset[str] = frozenset()
        self._begun = False
        self._value: list[str] = []
        self._behind: list[str] = []
        self._has_inner: bool | None = None
        self._inner = JsonText()
        self._json = JsonText()

    def _step(self, final: bool) -> Left | None:
        match self._at:
            case _At.CALL:
                return self._next_call(final)
            case _At.NAME:
                return self._in_name(final)
            case _At.ARGUMENTS:
                return self._next_argument(final)
            case _At.KEY:
                return self._in_key()
            case _At.VALUE:
                return self._begin_value(final)
            case _At.IN_VALUE:
                return self._in_value()
            case _At.BEHIND_VALUE:
                return self._behind_value(final)
            case _At.JSON:
                return self._in_json()
            case _At.END:
                return self._end_of_json(final)
            case _At.OBJECTS:
                text, self._text = self._text, ""
                return self._objects.feed(text, final)

    def _next_call(self, final: bool) -> Left | None:
        text = self._text = self._text.lstrip(SPACE)
        if self._any:
            if not (self._tags.call and text.startswith(self._tags.call)):
                waits = self._tags.call and partial_end(text, [self._tags.call]) == len(text) and not final
                return None if waits else self._after(text, final)
        elif text.startswith(("{", "[")) and self._close:
            self._at = _At.OBJECTS
            return None
        elif not text.startswith(self._tags.call):
            waits = partial_end(text, [self._tags.call]) == len(text) and not final
            return None if waits else self._failed()
        if text:
            self._raw = text
            self._text, self._at = text[len(self._tags.call) :], _At.NAME
        return None

    def _in_name(self, final: bool) -> Left | None:
        tags = self._tags
        marks = [tags.name_end] if tags.name_end else [mark for mark in (tags.argument, self._close, "\n") if mark]
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        at, mark = min(found, default=(len(self._text), ""))
        if at <= LONGEST_HEADER and not found:
            return None
        name = name_in(self._text[:at])
        if at > LONGEST_HEADER or _NAME.fullmatch(name) is None:
            return self._failed()
        self._text = self._text[at + len(mark) if mark == tags.name_end else at :]
        self._begin(name)
        self._sink.start(name)
        self._started = self._any = True
        self._at = _At.ARGUMENTS
        return None

    def _next_argument(self, final: bool) -> Left | None:
        text, tags = self._text.lstrip(SPACE), self._tags
        if text.startswith(tags.argument):
            self._text, self._at = text[len(tags.argument) :], _At.KEY
            return None
        if text.startswith("{") and not self._num_arguments:
            self._text, self._at = text, _At.JSON
            return None
        if tags.call_end and text.startswith(tags.call_end):
            self._text = text[len(tags.call_end) :]
        elif not any(next and text.startswith(next) for next in (self._close, tags.call)):
            ends = [end for end in (tags.argument, tags.call_end, tags.call, self._close) if end]
            if partial_end(text, ends) == len(text) and not final:
                return None
            self._text = text
            return self._cut_off()
        self._end_call()
        return None

    def _end_call(self) -> None:
        self._sink.arguments("}" if self._num_arguments else "{}")
        self._sink.end()
        self._started = False
        self._at = _At.CALL

    def _in_key(self) -> Left | None:
        end = self._text.find(self._tags.argument_end)
        if end < 0 and len(self._text) <= LONGEST_HEADER:
            return None
        if not 0 <= end <= LONGEST_HEADER:
            self._at = _At.ARGUMENTS  # `_cut_off` returns the rest as text
            return self._cut_off()
        named = self._text[:end]
        self._key = name_in(named)
        types = _types_in(named)
        self._types = self._tools.types(self._name, self._key) if types is None else types
        self._text, self._at = self._text[end + len(self._tags.argument_end) :], _At.VALUE
        self._begun = False
        return None

    def _begin_value(self, final: bool) -> Left | None:
        if self._tags.value:
            text = self._text.lstrip(SPACE)
            if not text.startswith(self._tags.value):
                waits = partial_end(text, [self._tags.value]) == len(text) and not final
                return None if waits else self._cut_off()
            self._text = text[len(self._tags.value) :]
        self._at = _At.IN_VALUE
        return None

    def _in_value(self) -> Left | None:
        if not self._tags.on_lines and self._types != {"string"} and not self._value:
            self._text = self._text.lstrip(SPACE)
        text, end = self._text, self._tags.value_end
        at = text.find(end)
        certain = text[:at] if at >= 0 else text[: len(text) - partial_end(text, [end])]
        passes_on = self._passes_on()
        if at < 0 and (passes_on is None or passes_on and not self._begun and certain in ("", "\n")):
            return None
        (self._pass_on if passes_on else self._collect)(certain)
        self._text = text[len(certain) :]
        if at >= 0:
            self._text = self._text[len(end) :]
            self._behind, self._at = [end], _At.BEHIND_VALUE
        return None

    def _behind_value(self, final: bool) -> Left | None:
        # A closing tag counts only before the next tag or the reply's end.
        text = self._text.lstrip(SPACE)
        self._behind.append(self._text[: len(self._text) - len(text)])
        self._text, tags = text, self._tags
        nexts = [tag for tag in (tags.argument, tags.call_end, tags.call, self._close) if tag]
        is_open = self._inner.is_in_string or not self._has_whole_cdata()
        if not is_open and text.startswith(tuple(nexts)):
            self._end_value()
        elif not is_open and partial_end(text, nexts) == len(text):
            if final:
                self._end_value()
        else:
            (self._pass_on if self._passes_on() else self._collect)("".join(self._behind))
            self._at = _At.IN_VALUE
        return None

    def _has_whole_cdata(self) -> bool:
        if not self._tags.cdata or self._begun:
            return True
        value = "".join(self._value).strip(SPACE)
        return not value.startswith(_CDATA) or value.endswith(_CDATA_END)

    def _passes_on(self) -> bool | None:
        if self._types != {"string"} or self._value and not self._begun:
            return False
        begins = self._text.lstrip(SPACE)[: len(_CDATA)]
        if not self._tags.cdata or self._begun or not _CDATA.startswith(begins):
            return True
        return False if begins == _CDATA else None

    def _collect(self, text: str) -> None:
        # `_inner`: a closing tag in a nested string does not end the value.
        if not text:
            return
        self._value.append(text)
        if self._has_inner is None:
            text = text.lstrip(SPACE)
            self._has_inner = ("string" not in self._types and text.startswith(("[", "{"))) if text else None
        if self._has_inner:
            self._inner.feed(text, 0)
            self._inner.take()

    def _pass_on(self, text: str) -> None:
        # A final line break may belong to the tag.
        on_lines = self._tags.on_lines
        if not self._begun:
            text, self._begun = text.removeprefix("\n") if on_lines else text, True
            self._put('"')
        text, self._value = "".join([*self._value, text]), []
        said = text.removesuffix("\n") if on_lines else text
        if said:
            self._sink.arguments(json_string(said, ensure_ascii=False)[1:-1])
        if len(said) < len(text):
            self._value.append(text[len(said) :])

    def _end_value(self) -> None:
        if self._begun:
            self._sink.arguments('"')
        else:
            self._put(write_json(self._converted("".join(self._value)), ensure_ascii=False))
        self._value, self._has_inner, self._inner = [], None, JsonText()
        self._begun, self._at = False, _At.ARGUMENTS

    def _put(self, value: str) -> None:
        key = json_string(self._key, ensure_ascii=False)
        self._sink.arguments(f"{', ' if self._num_arguments else '{'}{key}: {value}")
        self._num_arguments += 1

    def _converted(self, value: str) -> Any:
        inner = value.strip(SPACE)
        if self._tags.cdata and inner.startswith(_CDATA):
            return converted(inner.removeprefix(_CDATA).removesuffix(_CDATA_END), self._types, untyped=False)
        if self._tags.on_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        elif self._types != {"string"}:
            value = value.strip(SPACE)
        return converted(value, self._types, untyped=self._tags.untyped)

    def _in_json(self) -> Left | None:
        self._read_json(self._json)
        if self._json.is_broken:
            return self._cut_off()
        if self._json.is_done:
            self._sink.end()
            self._started = False
            self._at = _At.END if self._tags.call_end else _At.CALL
        return None

    def _end_of_json(self, final: bool) -> Left | None:
        # `call_end` may come later.
        text, end = self._text.lstrip(SPACE), self._tags.call_end
        if text.startswith(end) or final or partial_end(text, [end]) != len(text):
            self._text, self._at = text.removeprefix(end), _At.CALL
        return None

    def _cut_off(self) -> Left:
        if self._at is _At.OBJECTS:
            return self._objects.feed("", True) or Left()
        if not self._started:
            return Left(rest=self._text) if self._any else self._failed()
        if self._at is _At.JSON:
            self._end_json(self._json)
        else:
            if self._at is _At.IN_VALUE:
                self._cut_value()
            self._sink.arguments("}" if self._num_arguments else "{}")
            self._sink.end()
        self._started = False
        return Left(rest="" if self._at is _At.KEY else self._text)

    def _cut_value(self) -> None:
        # Values that are not strings need a closing tag.
        self._value.append(self._text)
        value, end = "".join(self._value), self._tags.value_end
        self._text = ""
        if self._begun:
            self._sink.arguments('"')
        elif end in value:
            if self._types and "string" not in self._types:
                value, _, self._text = value.rpartition(end)
            self._value = [value]
            self._end_value()


def name_in(tag: str) -> str:
    """Return the tag's name attribute, else its text without quotes."""
    attribute = _NAME_ATTRIBUTE.search(tag)
    if attribute is None:
        return tag.strip().strip("\"'")
    return next(group for group in attribute.groups() if group is not None).replace("&quot;", '"').replace("&amp;", "&")


def _types_in(tag: str) -> frozenset[str] | None:
    if (type_ := _TYPE_ATTRIBUTE.search(tag)) is not None:
        return frozenset([type_[1]])
    if (string := _STRING_ATTRIBUTE.search(tag)) is not None:
        return frozenset(["string"] if string[1] == "true" else [])
    return None


def converted(text: str, types: frozenset[str], *, untyped: bool, max_depth: int = _MAX_DEPTH) -> Any:
    """Convert an argument's text to a value of JSON schema `types`; too deep, it stays text.

    Without types, only null is converted, with `untyped` also JSON and Python literals.
    """
    if "string" in types and len(types) == 1:
        return text
    if not types and not untyped:
        return None if text.lower() == "null" else text
    if text.lower() == "null" or (text.lower() == "none" and "string" not in types):
        return None
    for kind, read in _READERS.items():
        if kind in types:
            try:
                return written_and_read(read(text), max_depth=max_depth)
            except (ValueError, LookupError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
                continue
    if "string" in types:
        return text
    try:
        return written_and_read(_structure(text), max_depth=max_depth)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _integer(text: str) -> int:
    value = float(text)
    if value != int(value):
        raise ValueError(f"{text!r:.40} is no integer")
    return int(text) if text.lstrip("+-").isdigit() else int(value)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value == int(value) else value


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}[
        text.lower()
    ]


def _structure(text: str) -> Any:
    try:
        value = parse_json(text, strict=False)
    except ValueError:
        if len(text) > _LONGEST_LITERAL:
            raise
        return ast.literal_eval(text)
    if isinstance(value, float) and math.isinf(float(text)):
        # `parse_json` would return the largest float.
        raise ValueError("no float64 holds it")
    return value


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _structure,
    "array": _structure,
}
