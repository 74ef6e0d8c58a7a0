"""JSON of clients and models, with bounded depth and valid strings: recursion and writing are safe."""

from __future__ import annotations

import json
import math
import re
import sys
from enum import Enum, auto
from itertools import islice
from typing import Any, NoReturn

MAX_DEPTH = 100
MAX_REPLY_DEPTH = MAX_DEPTH - 10  # clients send a model's values back inside messages

_NESTED = frozenset((dict, list))
_PLACE_STEPS = 6
_MOST_TOKENS = 100_000
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{},:]', re.DOTALL)
_HALF = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_NUMBER = 400
_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[A-Za-z0-9+.\-]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ESCAPES = frozenset('"\\/bfnrt')


class _RefusedConstant(ValueError):
    """NaN or Infinity."""


class _HalfOfPair(ValueError):
    """Half of a surrogate pair."""


class TooDeep(ValueError):
    """Too many levels of nesting."""


def parse_json(
    text: str,
    *,
    max_depth: int = MAX_DEPTH,
    max_chars: int | None = None,
    strict: bool = True,
    mends_halves: bool = False,
) -> Any:
    """Parse JSON; numbers beyond float64 become the largest. Raises TooDeep or ValueError.

    `strict` refuses raw control characters; `mends_halves` replaces lone surrogates by U+FFFD.
    """
    if max_chars is not None and len(text) > max_chars:
        raise ValueError(f"it has more than {max_chars} characters")
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, strict=strict)
    except (json.JSONDecodeError, _RefusedConstant):
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # from int()
        raise ValueError("a number in it has too many digits") from None
    if text.count("[") + text.count("{") > max_depth:
        _check_tree(value, max_depth)
    if _SURROGATE_ESCAPE.search(text) is not None:
        try:
            _check_strings(value)
        except _HalfOfPair:
            if not mends_halves:
                raise
            return _mended(value)
    return value


def deep_place(text: str, *, max_depth: int = MAX_DEPTH) -> str:
    """Return the path of the part nested too deeply, as "messages[0].content"; else empty."""
    steps: list[str | int] = []
    key = ""
    for found in islice(_TOKEN.finditer(text), _MOST_TOKENS):
        token = found[0]
        if token in "[{":
            if len(steps) == max_depth:
                return _path(steps[:_PLACE_STEPS])
            steps.append(0 if token == "[" else "")
        elif token in "]}":
            del steps[-1:]
        elif token == ":":
            steps[-1:] = [key]
        elif token != ",":
            key = token[1:-1]
        elif steps and isinstance(step := steps[-1], int):
            steps[-1] = step + 1
    return ""


def _path(steps: list[str | int]) -> str:
    texts = (f"[{step}]" if isinstance(step, int) else f".{step}" if step else '[""]' for step in steps)
    return "".join(texts).removeprefix(".")


def written_and_read(value: Any, *, max_depth: int = MAX_DEPTH) -> Any:
    """Write and parse: tuples become lists, keys strings."""
    return parse_json(write_json(value), max_depth=max_depth)


def write_json(value: Any, *, ensure_ascii: bool = True) -> str:
    """Write JSON. Raises ValueError for NaN, Infinity, other types and deep nesting."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON: {error!r:.100}") from error


def canonical_json(value: Any) -> str:
    """Write JSON with sorted keys; `true`, `1` and `1.0` differ. Raises ValueError."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON: {error!r:.100}") from error


def json_string(text: str, *, ensure_ascii: bool = True) -> str:
    return json.dumps(text, ensure_ascii=ensure_ascii)


def _finite(number: str) -> float:
    return min(max(float(number), -sys.float_info.max), sys.float_info.max)


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedConstant(f"{name} is not JSON")


def _too_deep() -> TooDeep:
    return TooDeep("it is nested too deeply")


def _check_tree(value: Any, max_depth: int) -> None:
    # Hot path.
    level = [value] if type(value) in _NESTED else []
    for _ in range(max_depth):
        if not level:
            return
        values = (node.values() if type(node) is dict else node for node in level)
        level = [child for children in values for child in children if type(child) in _NESTED]
    if level:
        raise _too_deep()


def _check_strings(value: Any) -> None:
    level = [[value]]
    while level:
        for values in level:
            for each in values:
                _check_string(each)
        nested = [each for values in level for each in values if type(each) in _NESTED]
        level = [[*node.keys(), *node.values()] if type(node) is dict else node for node in nested]


def _check_string(value: Any) -> None:
    if not isinstance(value, str):
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _HalfOfPair("a string in it holds half of a surrogate pair") from None


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_mended(key): _mended(inner) for key, inner in value.items()}
    return [_mended(inner) for inner in value] if isinstance(value, list) else value


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    WORD = auto()
    NOTHING = auto()


class JsonText:
    """Streaming parser for one JSON value.

    Repairs control characters, unknown escapes, lone surrogates, trailing commas and Python's constants.
    Other errors set `is_broken`.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._out: list[str] = []
        self._expect = _Expect.VALUE
        self._open: list[str] = []
        self._held = ""  # a key, emitted with its value to stay completable
        self._comma = False
        self._string: list[str] = []
        self._is_key = False
        self._escape = ""
        self._half = ""
        self._word = ""

    @property
    def is_in_string(self) -> bool:
        return self._expect is _Expect.STRING and not self.is_broken

    @property
    def expects_key(self) -> bool:
        return self._expect is _Expect.KEY_OR_END

    def feed(self, text: str, at: int) -> int:
        """Parse up to the value's end or an error; return that position."""
        while at < len(text) and not (self.is_done or self.is_broken):
            at = self._step(text, at)
        return at

    def take(self) -> str:
        out = "".join(self._out)
        self._out.clear()
        return out

    def complete(self) -> None:
        """Close an unfinished value; without a beginning it is null."""
        if self.is_done:
            return
        if self._expect is _Expect.STRING:
            self._flush_half()
            self._end_string()
        elif self._expect is _Expect.WORD:
            self._end_word()
        if not self._open and self._expect is _Expect.VALUE:
            self._out.append("null")
        self._out.extend(reversed(self._open))
        self._open.clear()
        self.is_done = True

    def _step(self, text: str, at: int) -> int:
        if self._expect is _Expect.STRING:
            return self._in_string(text, at)
        if self._expect is _Expect.WORD:
            return self._in_word(text, at)
        character = text[at]
        if character in _SPACE:
            return at + 1
        if character in "}]":
            return self._end_container(character, at)
        if self._expect is _Expect.COLON:
            return self._punctuation(character == ":", _Expect.VALUE, at)
        if self._expect is _Expect.COMMA_OR_END:
            self._comma = True
            after = _Expect.KEY_OR_END if self._open[-1] == "}" else _Expect.VALUE_OR_END
            return self._punctuation(character == ",", after, at)
        if self._expect is _Expect.KEY_OR_END:
            self._is_key = True
            return self._punctuation(character == '"', _Expect.STRING, at)
        return self._begin_value(character, at)

    def _punctuation(self, is_right: bool, after: _Expect, at: int) -> int:
        if not is_right:
            self.is_broken = True
            return at
        self._expect = after
        return at + 1

    def _begin_value(self, character: str, at: int) -> int:
        if character == '"':
            self._pass_on('"')
            self._is_key, self._expect = False, _Expect.STRING
            return at + 1
        if character in "{[":
            if len(self._open) >= MAX_REPLY_DEPTH:
                self.is_broken = True
                return at
            self._pass_on(character)
            self._open.append("}" if character == "{" else "]")
            self._expect = _Expect.KEY_OR_END if character == "{" else _Expect.VALUE_OR_END
            return at + 1
        if _WORD.match(character) is None:
            self.is_broken = True
            return at
        self._expect = _Expect.WORD
        return at

    def _pass_on(self, text: str) -> None:
        comma = ", " if self._comma else ""
        self._out.append(comma + self._held + text)
        self._comma, self._held = False, ""

    def _end_container(self, character: str, at: int) -> int:
        ends = self._expect in (_Expect.COMMA_OR_END, _Expect.KEY_OR_END, _Expect.VALUE_OR_END)
        if not ends or not self._open or self._open[-1] != character:
            self.is_broken = True
            return at
        self._comma = False
        self._out.append(self._open.pop())
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._expect = _Expect.COMMA_OR_END if self._open else _Expect.NOTHING
        self.is_done = not self._open

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            return self._in_escape(text[at], at)
        plain = _PLAIN.match(text, at)
        if plain is not None:
            self._add(plain[0])
            return plain.end()
        character = text[at]
        if character == "\\":
            self._escape = "\\"
        elif character == '"':
            self._flush_half()
            self._end_string()
        else:
            self._add(json_string(character)[1:-1])
        return at + 1

    def _in_escape(self, character: str, at: int) -> int:
        if self._escape == "\\":
            if character == "u":
                self._escape = "\\u"
                return at + 1
            self._escape = ""
            if character in _ESCAPES:
                self._add("\\" + character)
                return at + 1
            self._add("\\\\")  # a literal backslash; `character` follows as text
            return at
        if character not in "0123456789abcdefABCDEF":
            self._add("\\" + self._escape)
            self._escape = ""
            return at
        self._escape += character
        if len(self._escape) == 6:
            self._end_code_unit()
        return at + 1

    def _end_code_unit(self) -> None:
        code, escape = int(self._escape[2:], 16), self._escape
        self._escape = ""
        if 0xD800 <= code < 0xDC00:
            self._flush_half()
            self._half = escape
        elif 0xDC00 <= code < 0xE000:
            self._put(self._half + escape if self._half else "\\ufffd")
            self._half = ""
        else:
            self._add(escape)

    def _flush_half(self) -> None:
        if self._half:
            self._half = ""
            self._put("\\ufffd")

    def _add(self, text: str) -> None:
        self._flush_half()
        self._put(text)

    def _put(self, text: str) -> None:
        (self._string if self._is_key else self._out).append(text)

    def _end_string(self) -> None:
        self._escape = ""
        if self._is_key:
            self._held = f'"{"".join(self._string)}": '
            self._string.clear()
            self._expect = _Expect.COLON
        else:
            self._out.append('"')
            self._end_value()

    def _in_word(self, text: str, at: int) -> int:
        word = _WORD.match(text, at)
        if word is not None:
            self._word += word[0]
            if len(self._word) > _MAX_NUMBER:
                self.is_broken = True
                self._word = ""
            return word.end()
        self._end_word()
        return at

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        known = _WORDS.get(word)
        if known is None and _NUMBER.fullmatch(word) is not None and math.isfinite(float(word)):
            known = word
        if known is None:
            self.is_broken = True
            self._expect = _Expect.COMMA_OR_END
            return
        self._pass_on(known)
        self._end_value()
