"""The only reader and writer of JSON that clients and models send.

What it returns can be walked through recursively, compared, shown and written again. `tests/test_house.py` keeps the
standard library's functions out of the modules that handle such text.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

MAX_DEPTH = 100
# Of values that a model writes: clients send them back inside of messages, and what they send must be readable.
MAX_REPLY_DEPTH = MAX_DEPTH - 10

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class _RefusedConstant(ValueError):
    """NaN or Infinity, which Python's reader takes and JSON does not have."""


def parse_json(text: str, *, max_depth: int = MAX_DEPTH, max_chars: int | None = None, strict: bool = True) -> Any:
    """The value that `text` holds. Of equal keys in an object the last one counts.

    Args:
        max_depth: levels of objects and lists there may be.
        max_chars: length of the longest text that is read; None for any.
        strict: whether raw control characters in strings are errors.

    Raises:
        ValueError: not JSON (NaN and Infinity are not), longer than `max_chars`, nested deeper than `max_depth`, or
            with a number of thousands of digits or half of a surrogate pair in it.
    """
    if max_chars is not None and len(text) > max_chars:
        raise ValueError(f"it has more than {max_chars} characters")
    try:
        value = json.loads(text, parse_constant=_refuse_constant, strict=strict)
    except (json.JSONDecodeError, _RefusedConstant):
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # of int(), whose words are for programmers
        raise ValueError("a number in it has too many digits") from None
    _check_tree(value, max_depth, check_strings=_SURROGATE_ESCAPE.search(text) is not None)
    return value


def written_and_read(value: Any, *, max_depth: int = MAX_DEPTH) -> Any:
    """`value` as whoever gets it as JSON will read it: tuples are lists, keys are strings.

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


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedConstant(f"{name} is not JSON")


def _too_deep() -> ValueError:
    return ValueError("it is nested too deeply")


def _check_tree(value: Any, max_depth: int, *, check_strings: bool) -> None:
    level = _nested([value], check_strings)
    for _ in range(max_depth):
        if not level:
            return
        level = [child for node in level for child in _children(node, check_strings)]
    if level:
        raise _too_deep()


def _children(node: Any, check_strings: bool) -> list[Any]:
    return _nested([*node.keys(), *node.values()] if isinstance(node, dict) else node, check_strings)


def _nested(values: list[Any], check_strings: bool) -> list[Any]:
    """The objects and lists among `values`."""
    if check_strings:
        for value in values:
            _check_string(value)
    return [value for value in values if isinstance(value, dict | list)]


def _check_string(value: Any) -> None:
    if not isinstance(value, str):
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a string in it holds half of a surrogate pair") from None
