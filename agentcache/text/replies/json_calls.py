"""Streaming parsers for calls with JSON arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from agentcache.text.json_values import MAX_REPLY_DEPTH, JsonText, parse_json, write_json
from agentcache.text.replies.calls import LONGEST_HEADER, SPACE, CallReader, CallSink, Left, Steps, Tools

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_NESTING_KEYS = ("function", "tool")
_FIRST_KEYS = (*_NAME_KEYS, *_NESTING_KEYS, "type")  # may precede the name
_NO_NAME = re.compile(
    r"```(json)?|<[|｜]tool[_▁](sep|call[_▁]argument[_▁]begin)[|｜]>|\[CALL_ID\][^\[]*|\[ARGS\]"
    r"|<\|tool_call:(name|args)\|>"
)
_TO_SELF = "to=self"
_EVERYONE = "all"
_BEGINS = re.compile(r"\s*(t(o(=.*)?)?)?", re.DOTALL)


class _InCall(Enum):
    HEADER = auto()
    ARGUMENTS = auto()
    BEHIND = auto()
    OBJECTS = auto()


class HeaderCall(Steps):
    """Parses one call: header with name, arguments object, closing marker."""

    _at: _InCall

    def __init__(
        self, sink: CallSink, close: str, name_of: Callable[[str], str | None], objects: ObjectCalls | None = None
    ) -> None:
        super().__init__(sink, close)
        self._name_of = name_of
        self._objects = objects
        self._at = _InCall.HEADER
        self._arguments = JsonText()

    def _step(self, final: bool) -> Left | None:
        if self._at is _InCall.HEADER:
            return self._header(final)
        if self._at is _InCall.ARGUMENTS:
            return self._in_arguments()
        if self._at is _InCall.OBJECTS and self._objects is not None:
            text, self._text = self._text, ""
            return self._objects.feed(text, final)
        return self._after(self._behind_call("}`"), final)

    def _header(self, final: bool) -> Left | None:
        if self._objects is not None and self._text.lstrip(SPACE).startswith(("[", "{")):
            self._at = _InCall.OBJECTS
            return None
        brace = self._text.find("{")
        close = self._text.find(self._close) if self._close else -1
        end = min((end for end in (brace, close) if end >= 0), default=-1)
        if end < 0 and not final and len(self._text) <= LONGEST_HEADER:
            return None
        name = self._name_of(self._text[:end]) if 0 <= end <= LONGEST_HEADER else None
        if name is None:
            return self._failed()
        self._text = self._text[end:]
        if end == brace:
            self._at, self._started = _InCall.ARGUMENTS, True
            self._sink.start(name)
        else:
            self._at = _InCall.BEHIND
            self._sink.whole(name, "{}")
        return None

    def _in_arguments(self) -> Left | None:
        self._read_json(self._arguments)
        if self._arguments.is_broken:
            return self._cut_off()
        if self._arguments.is_done:
            self._sink.end()
            self._at = _InCall.BEHIND
        return None

    def _cut_off(self) -> Left:
        if self._at is _InCall.ARGUMENTS:
            self._end_json(self._arguments)
        return Left(rest=self._text)


class _InObject(Enum):
    BEGIN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NAME = auto()
    ARGUMENTS = auto()
    ARGUMENTS_IN_STRING = auto()
    OTHER = auto()
    BEHIND = auto()


class ObjectCalls(Steps):
    """Parses call objects, maybe in a list, up to a closing marker. `is_keyed`: a call is `{name: arguments}`."""

    _at: _InObject

    def __init__(
        self, sink: CallSink, close: str, tools: Tools, *, must_be_known: bool = False, is_keyed: bool = False
    ) -> None:
        super().__init__(sink, close)
        self._tools = tools
        self._must_be_known = must_be_known
        self._is_keyed = is_keyed
        self._begin()

    def _begin(self) -> None:
        self._at = _InObject.BEGIN
        self._started = False
        self._name: str | None = None
        self._held = ""  # before the name
        self._key = ""
        self._nested = 0
        self._value = JsonText()
        self._captured = ""

    def _step(self, final: bool) -> Left | None:
        match self._at:
            case _InObject.BEGIN:
                return self._first_brace()
            case _InObject.KEY:
                return self._next_key()
            case _InObject.COLON:
                return self._colon()
            case _InObject.VALUE:
                return self._begin_value()
            case _InObject.BEHIND:
                return self._behind(final)
            case _:
                return self._in_value()

    def _first_brace(self) -> Left | None:
        text = self._text.lstrip(SPACE)
        if text.startswith("["):
            self._text = text[1:]
        elif text.startswith("{"):
            self._text, self._at = text[1:], _InObject.KEY
        elif text:
            return self._failed()
        return None

    def _next_key(self) -> Left | None:
        text = self._text.lstrip(SPACE + ",")
        if text.startswith("}"):
            self._text = text[1:]
            if not self._nested:
                return self._end_object()
            self._nested -= 1
        elif text.startswith('"'):
            end = _string_end(text)
            if end is not None:
                self._key, self._text, self._at = text[1 : end - 1], text[end:], _InObject.COLON
                if self._must_be_known and self._name is None and self._key not in _FIRST_KEYS:
                    return self._failed()
        elif text:
            return self._failed()
        return None

    def _colon(self) -> Left | None:
        text = self._text.lstrip(SPACE)
        if text.startswith(":"):
            self._text, self._at = text[1:], _InObject.VALUE
        elif text:
            return self._failed()
        return None

    def _begin_value(self) -> Left | None:
        text = self._text = self._text.lstrip(SPACE)
        if not text:
            return None
        self._value, self._captured = JsonText(), ""
        self._at = _InObject.OTHER
        if self._is_keyed and self._name is None and text[0] == "{":
            self._at = _InObject.ARGUMENTS
            return self._take_name(_mended_string(f'"{self._key}"'))
        if self._key in _ARGUMENT_KEYS:
            kinds = {"{": _InObject.ARGUMENTS, '"': _InObject.ARGUMENTS_IN_STRING, "n": _InObject.OTHER}
            if text[0] not in kinds:
                return self._failed()
            self._at = kinds[text[0]]
        elif self._key in _NESTING_KEYS and text[0] == "{":
            self._nested += 1
            self._text, self._at = text[1:], _InObject.KEY
        elif self._key in _NAME_KEYS + _NESTING_KEYS:
            self._at = _InObject.NAME
        return None

    def _in_value(self) -> Left | None:
        self._text = self._text[self._value.feed(self._text, 0) :]
        piece = self._value.take()
        if self._at is _InObject.ARGUMENTS:
            self._pass_on(piece)
        else:
            self._captured += piece
        if self._value.is_broken:
            return self._cut_off()
        if not self._value.is_done:
            return self._failed() if self._is_another_name() else None
        return self._end_value()

    def _is_another_name(self) -> bool:
        return (
            self._must_be_known and self._at is _InObject.NAME and not self._tools.may_begin(self._captured.lstrip('"'))
        )

    def _end_value(self) -> Left | None:
        at, self._at = self._at, _InObject.KEY
        if at is _InObject.NAME:
            return self._take_name(parse_json(self._captured))
        if at is _InObject.ARGUMENTS_IN_STRING:
            arguments = _object_in(self._captured)
            if arguments is None:
                return self._failed()
            self._pass_on(arguments)
        return None

    def _take_name(self, name: Any) -> Left | None:
        if not isinstance(name, str) or not name or (self._must_be_known and not self._tools.has(name)):
            return self._failed()
        self._name = name
        held, self._held = self._held, ""
        self._pass_on(held)
        return None

    def _pass_on(self, arguments: str) -> None:
        if not arguments:
            return
        if self._name is None:
            self._held += arguments
            return
        if not self._started:
            self._sink.start(self._name)
            self._started = True
        self._sink.arguments(arguments)

    def _end_object(self) -> Left | None:
        if self._name is None or (self._must_be_known and not self._started):
            return self._failed()
        if self._started:
            self._sink.end()
        else:
            self._sink.whole(self._name, "{}")
        self._at = _InObject.BEHIND
        return None

    def _behind(self, final: bool) -> Left | None:
        text = self._behind_call("]},;`")
        if text.startswith("{") and not self._must_be_known:
            self._raw = text
            self._begin()
            return None
        return self._after(text, final)

    def _failed(self) -> Left:
        if not self._started:
            return super()._failed()
        self._sink.end()
        return Left(rest=self._text)

    def _cut_off(self) -> Left:
        if self._at is _InObject.BEHIND:
            return Left(rest=self._text)
        if self._started and self._at is _InObject.ARGUMENTS:
            self._value.complete()
            self._sink.arguments(self._value.take())
        return self._failed()


def _string_end(text: str) -> int | None:
    at = 1
    while (found := text.find('"', at)) > 0:
        backslashes = found - len(text[:found].rstrip("\\"))
        if backslashes % 2 == 0:
            return found + 1
        at = found + 1
    return None


def _mended_string(text: str) -> Any:
    mended = JsonText()
    mended.feed(text, 0)
    return parse_json(mended.take())


def _object_in(string: str) -> str | None:
    try:
        value = parse_json(parse_json(string) or "{}", max_depth=MAX_REPLY_DEPTH)
    except ValueError:
        return None
    return write_json(value, ensure_ascii=False) if isinstance(value, dict) else None


def function_name(header: str) -> str | None:
    """Return the tool name in a header such as `functions.look:0`."""
    words = _NO_NAME.sub(" ", header).split()
    return words[-1].removeprefix("functions.").partition(":")[0] or None if words else None


class HeaderEnd:
    """Drops a header up to `message`, but for `to=self`, which opens reasoning."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._text = ""

    def feed(self, text: str, final: bool) -> Left | None:
        self._text += text
        header, found, rest = self._text.partition(self._message)
        # Calls demanded by grammars have no header.
        if len(header) > LONGEST_HEADER or _BEGINS.fullmatch(header) is None:
            return Left(rest=self._text)
        if found:
            return Left(rest=f"{_TO_SELF}{self._message}{rest}" if header.strip(SPACE) == _TO_SELF else rest)
        return Left(rest=self._text) if final else None


class LineCalls:
    """Parses a line with a tool's name, then JSON; or with `all`, then text."""

    def __init__(self, sink: CallSink, tools: Tools, marker: str) -> None:
        self._sink = sink
        self._tools = tools
        self._marker = marker
        self._text = ""
        self._call: CallReader | None = None

    def feed(self, text: str, final: bool) -> Left | None:
        if self._call is not None:
            return self._read_call(self._call, text, final)
        self._text += text
        line, newline, rest = self._text.partition("\n")
        if not newline and not final and len(line) <= LONGEST_HEADER:
            return None
        name = line.strip(SPACE)
        if newline and name == _EVERYONE:
            return Left(rest=rest)
        if not newline or not self._tools.has(name):
            return Left(shown=self._marker + line + newline, rest=rest, has_failed=True)
        self._call = HeaderCall(self._sink, "", lambda header: name if header.strip(SPACE) == name else None)
        return self._read_call(self._call, self._text, final)

    def _read_call(self, call: CallReader, text: str, final: bool) -> Left | None:
        left = call.feed(text, final)
        return replace(left, shown=self._marker + left.shown) if left is not None and left.has_failed else left
