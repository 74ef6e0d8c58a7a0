"""Reads and writes all JSON that clients and models send.

Depth is bounded and strings are valid: recursion and writing are safe. `tests/test_house.py` enforces its use.
"""

from __future__ import annotations

import json
import re
import sys
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


class _RefusedConstant(ValueError):
    """NaN or Infinity, which only Python reads."""


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
    """Parse JSON. The last of equal keys wins; numbers beyond float64 become the largest one.

    Args:
        max_depth: levels of objects and lists.
        strict: whether raw control characters in strings are errors.
        mends_halves: whether half of a surrogate pair becomes U+FFFD, not an error.

    Raises:
        TooDeep: deeper than `max_depth`.
        ValueError: not JSON, NaN, Infinity, too long, half of a surrogate pair, or an integer with thousands of digits.
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
    """Return the path to the part nested too deeply, as "messages[0].content"; empty if not found."""
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
    """Write and parse `value`: tuples become lists, keys strings. Raises as `write_json` and `parse_json`."""
    return parse_json(write_json(value), max_depth=max_depth)


def write_json(value: Any, *, ensure_ascii: bool = True) -> str:
    """Write JSON. Raises ValueError for NaN, Infinity, other types and deep nesting."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON: {error!r:.100}") from error


def canonical_json(value: Any) -> str:
    """Write sorted JSON, equal only for equal values; `true`, `1` and `1.0` differ. Raises ValueError."""
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
    # Hot path: most of the time of `parse_json`.
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
