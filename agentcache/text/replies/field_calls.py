"""Streaming parser for calls with `name value` fields: Gemma 4, FunctionGemma, LFM2."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from agentcache.text.json_values import JsonText, json_string, write_json
from agentcache.text.replies.calls import LONGEST_HEADER, SPACE, CallSink, Left, Steps, Tools, partial_end
from agentcache.text.replies.json_calls import ObjectCalls
from agentcache.text.replies.tagged_calls import converted

_NAME = re.compile(r"[\w.\-]*")
_FIELD_NAME = re.compile(r"[\w\-]*")
_WORDS = re.compile(r"[^{}()\[\],]*")
_LONGEST_WORDS = 10_000
_BRACKETS = {"(": "[", "[": "[", "{": "{", ")": "]", "]": "]", "}": "}", ",": ",", ":": ":"}
_AFTER_STRING = ",:]})"
_PLAIN = re.compile(r"[^\\\"']+")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_HALF_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{0,2})")
# Of JSON and of Python.
_ESCAPED = {character: f"\\{character}" for character in '"\\bfnrt'} | {
    "/": "/",
    "'": "'",
    "\n": "",
    "a": r"\u0007",
    "v": r"\u000b",
}


@dataclass(frozen=True)
class FieldNotation:
    """Punctuation of a call format. `around`: characters allowed around calls. `opening`: text before a name.

    Longer `quotes` are first; backslash escapes count only inside `'` and `"`.
    """

    around: str
    opening: str
    open: str
    close: str
    assign: str
    quotes: tuple[str, ...]

    def coded(self, code: Callable[[str], str]) -> FieldNotation:
        quotes = tuple(code(quote) for quote in self.quotes)
        return FieldNotation(self.around, self.opening, self.open, self.close, self.assign, quotes)


class FieldText:
    """Converts one call's arguments to JSON."""

    def __init__(self, notation: FieldNotation) -> None:
        self._notation = notation
        self._quote = ""
        self._depth = 0
        self.json = JsonText()
        self.json.feed("{", 0)

    def feed(self, text: str) -> str:
        """Parse up to the arguments' end or an error. Return unread text, to be fed again."""
        while text and not (self.json.is_done or self.json.is_broken):
            read = self._in_string(text) if self._quote else self._outside(text)
            if not read:
                break
            text = text[read:]
        return text

    # Each step returns the length read; 0 if it needs more text.

    def _outside(self, text: str) -> int:
        if text[0] in SPACE:
            return 1
        if any(len(quote) > len(text) and quote.startswith(text) for quote in self._notation.quotes):
            return 0
        quote = next((quote for quote in self._notation.quotes if text.startswith(quote)), "")
        if quote:
            self._quote = quote
            self._pass_on('"')
            return len(quote)
        if text[0] == self._notation.close and not self._depth:
            self._pass_on("}")
            return 1
        if text[0] in _BRACKETS:
            self._depth += (text[0] in "([{") - (text[0] in ")]}")
            self._pass_on(_BRACKETS[text[0]])
            return 1
        return self._name(text) if self.json.expects_key else self._value(text)

    def _name(self, text: str) -> int:
        end = _match_end(_FIELD_NAME, text)
        assign = text[end:].lstrip(SPACE)
        if not assign and len(text) <= LONGEST_HEADER:
            return 0
        if not end or not assign.startswith(self._notation.assign):
            self.json.is_broken = True
            return 0
        self._pass_on(_quoted(text[:end]) + ":")
        return len(text) - len(assign) + len(self._notation.assign)

    def _value(self, text: str) -> int:
        end = _match_end(_WORDS, text)
        if end == len(text) or end > _LONGEST_WORDS:
            self.json.is_broken = end > _LONGEST_WORDS
            return 0
        self._pass_on(_quoted(converted(text[:end].rstrip(SPACE), frozenset(), untyped=True)))
        return end

    def _in_string(self, text: str) -> int:
        quote = self._quote
        is_plain = quote[0] in "\"'"
        if text.startswith(quote) and (is_plain or (ends := self._is_followed(text[len(quote) :]))):
            self._quote = ""
            self._pass_on('"')
            return len(quote)
        if is_plain:
            return self._in_plain_string(text)
        if text.startswith(quote):
            if ends is None:
                return 0
            self._pass_on(_quoted(quote)[1:-1])
            return len(quote)
        end = text.find(quote)
        end = end if end >= 0 else len(text) - partial_end(text, [quote])
        self._pass_on(_quoted(text[:end])[1:-1])
        return end

    def _is_followed(self, text: str) -> bool | None:
        # A quote ends the string only before these.
        text = text.lstrip(SPACE)
        return text[0] in (*_AFTER_STRING, self._notation.close, self._notation.assign) if text else None

    def _in_plain_string(self, text: str) -> int:
        plain = _match_end(_PLAIN, text)
        if plain:
            self._pass_on(_quoted(text[:plain])[1:-1])
            return plain
        if text[0] == "\\":
            found = None if _HALF_ESCAPE.fullmatch(text) else _ESCAPE.match(text)
            if found is None:
                return 0
            self._pass_on(_unescaped(found[1]))
            return found.end()
        if self._quote.startswith(text):
            return 0
        self._pass_on(_quoted(text[0])[1:-1])
        return 1

    def _pass_on(self, piece: str) -> None:
        self.json.feed(piece, 0)


class _At(Enum):
    HEADER = auto()
    ARGUMENTS = auto()
    OBJECTS = auto()


class FieldCalls(Steps):
    """Parses field calls, or JSON objects, up to the closing marker."""

    _at: _At

    def __init__(self, sink: CallSink, close: str, tools: Tools, notation: FieldNotation) -> None:
        super().__init__(sink, close)
        self._notation = notation
        self._objects = ObjectCalls(sink, close, tools)
        self._fields = FieldText(notation)
        self._at = _At.HEADER
        self._any = False

    def _step(self, final: bool) -> Left | None:
        if self._at is _At.HEADER:
            return self._header(final)
        if self._at is _At.ARGUMENTS:
            return self._in_arguments()
        text, self._text = self._text, ""
        return self._objects.feed(text, final)

    def _header(self, final: bool) -> Left | None:
        text, opening = self._text.lstrip(SPACE + self._notation.around), self._notation.opening
        if text.startswith("{") and not self._any:
            self._at = _At.OBJECTS
            return None
        if len(text) < len(opening) and opening.startswith(text):
            return None
        end = _match_end(_NAME, text, len(opening))
        if not text.startswith(opening) or not text.startswith(self._notation.open, end) or end == len(opening):
            if end == len(text) <= LONGEST_HEADER and text.startswith(opening) and not final:
                return None
            return self._after(text, final) if self._any else self._failed()
        self._sink.start(text[len(opening) : end])
        self._text = text[end + len(self._notation.open) :]
        self._fields = FieldText(self._notation)
        self._started = self._any = True
        self._at = _At.ARGUMENTS
        return None

    def _in_arguments(self) -> Left | None:
        arguments = self._fields.json
        self._text = self._fields.feed(self._text)
        self._sink.arguments(arguments.take())
        if arguments.is_broken:
            return self._cut_off()
        if arguments.is_done:
            self._sink.end()
            self._started = False
            self._at = _At.HEADER
        return None

    def _cut_off(self) -> Left:
        if self._at is _At.OBJECTS:
            return self._objects.feed("", True) or Left()
        if self._at is _At.HEADER:
            return Left(rest=self._text) if self._any else self._failed()
        self._end_json(self._fields.json)
        return Left(rest=self._text if self._fields.json.is_broken else "")


def _match_end(pattern: re.Pattern[str], text: str, at: int = 0) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _quoted(value: object) -> str:
    return write_json(value, ensure_ascii=False)


def _unescaped(code: str) -> str:
    if code in _ESCAPED:
        return _ESCAPED[code]
    kind = code[0]
    if kind == "u" and len(code) > 1:
        return "\\" + code  # may be a surrogate
    if kind in "01234567" or (kind in "xU" and len(code) > 1):
        number = int(code, 8) if kind.isdigit() else int(code[1:], 16)
        is_character = number <= 0x10FFFF and not 0xD800 <= number < 0xE000
        return json_string(chr(number) if is_character else "\ufffd")[1:-1]
    return "\\\\" + _quoted(code)[1:-1]
