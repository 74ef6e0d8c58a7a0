"""The only reader and writer of JSON that clients and models send.

What it returns can be walked through recursively, compared, shown and written again. `tests/test_house.py` keeps the
standard library's functions out of the modules that handle such text.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import islice
from typing import Any, NoReturn

MAX_DEPTH = 100
# Of values that a model writes: clients send them back inside of messages, and what they send must be readable.
MAX_REPLY_DEPTH = MAX_DEPTH - 10

_NESTED = frozenset((dict, list))
_PLACE_STEPS = 6
_MOST_TOKENS = 100_000  # some hundredths of a second
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{},:]', re.DOTALL)
_HALF = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class _RefusedConstant(ValueError):
    """NaN or Infinity, which Python's reader takes and JSON does not have."""


class _HalfOfPair(ValueError):
    """Half of a surrogate pair, which is no character."""


class TooDeep(ValueError):
    """A value with more levels of objects and lists than may be."""


def parse_json(
    text: str,
    *,
    max_depth: int = MAX_DEPTH,
    max_chars: int | None = None,
    strict: bool = True,
    mends_halves: bool = False,
) -> Any:
    """The value that `text` holds. Of equal keys in an object the last one counts.

    A number beyond the range of float64 becomes the largest one there is: Python's reader makes it infinite, and JSON
    cannot say that again.

    Args:
        max_depth: levels of objects and lists there may be.
        max_chars: length of the longest text that is read; None for any.
        strict: whether raw control characters in strings are errors.
        mends_halves: whether half of a surrogate pair becomes U+FFFD instead of an error.

    Raises:
        TooDeep: nested deeper than `max_depth`; a `ValueError`, too.
        ValueError: not JSON (NaN and Infinity are not), longer than `max_chars`, or with a number of thousands of
            digits or half of a surrogate pair in it.
    """
    if max_chars is not None and len(text) > max_chars:
        raise ValueError(f"it has more than {max_chars} characters")
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, strict=strict)
    except (json.JSONDecodeError, _RefusedConstant):
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # of int(), whose words are for programmers
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
    """The path to what is nested too deeply in a JSON text, as in "messages[0].content"; empty where it is not found.

    It has at most `_PLACE_STEPS` steps. No more than `_MOST_TOKENS` tokens are looked at.
    """
    steps: list[str | int] = []  # the key or index in each open object or list
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
    """`value` as a client that gets it as JSON reads it: tuples are lists, keys are strings.

    Raises:
        ValueError: JSON cannot say it, or `parse_json` would not read it.
    """
    return parse_json(write_json(value), max_depth=max_depth)


def write_json(value: Any, *, ensure_ascii: bool = True) -> str:
    """The JSON text of `value`.

    Raises:
        ValueError: JSON cannot say it (NaN and Infinity are not JSON), or it is nested too deeply.
    """
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON: {error!r:.100}") from error


def canonical_json(value: Any) -> str:
    """A text that is equal for equal JSON values only: `true`, `1` and `1.0` differ, orders of keys do not.

    Raises:
        ValueError: JSON cannot say it, or it is nested too deeply.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON: {error!r:.100}") from error


def json_string(text: str, *, ensure_ascii: bool = True) -> str:
    """`text` as a JSON string, with its quotes."""
    return json.dumps(text, ensure_ascii=ensure_ascii)


def _finite(number: str) -> float:
    return min(max(float(number), -sys.float_info.max), sys.float_info.max)


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedConstant(f"{name} is not JSON")


def _too_deep() -> TooDeep:
    return TooDeep("it is nested too deeply")


def _check_tree(value: Any, max_depth: int) -> None:
    """Refuse what is nested too deeply. A few dozen nanoseconds a value: it is most of what reading JSON takes."""
    level = [value] if type(value) in _NESTED else []
    for _ in range(max_depth):
        if not level:
            return
        values = (node.values() if type(node) is dict else node for node in level)
        level = [child for children in values for child in children if type(child) in _NESTED]
    if level:
        raise _too_deep()


def _check_strings(value: Any) -> None:
    """Refuse halves of surrogate pairs in a value that is not nested too deeply."""
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
    """A value that is not nested too deeply, with U+FFFD in place of halves of surrogate pairs."""
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_mended(key): _mended(inner) for key, inner in value.items()}
    return [_mended(inner) for inner in value] if isinstance(value, list) else value
