from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.models.text.json_values import MAX_DEPTH, json_string, parse_json, write_json, written_and_read

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_what_json_says_is_read(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
    assert written_and_read(value) == value


@given(st.text() | st.text('[]{}":,\\\\ud8e1-.9 truNa', max_size=300))
def test_any_text_gives_a_value_or_one_error(text: str) -> None:
    try:
        value = parse_json(text)
    except ValueError:
        return
    assert parse_json(write_json(value)) == value


def test_of_equal_keys_the_last_one_counts() -> None:
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}


def test_a_text_that_is_too_long() -> None:
    assert parse_json("[1, 2]", max_chars=6) == [1, 2]
    with pytest.raises(ValueError, match="more than 5 characters"):
        parse_json("[1, 2]", max_chars=5)


def lists(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Expecting"),
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1" * 5000, "too many digits"),
        (lists(MAX_DEPTH + 1), "nested too deeply"),
        (lists(500), "nested too deeply"),
        (lists(100_000), "nested too deeply"),
        (r'"\ud800"', "surrogate"),
        (r'[{"\uDFFF": 1}]', "surrogate"),
    ],
)
def test_what_could_not_be_shown_again(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


def test_nesting_up_to_the_limit() -> None:
    assert parse_json(lists(MAX_DEPTH)) and parse_json(lists(3), max_depth=3)
    with pytest.raises(ValueError, match="nested"):
        parse_json(lists(4), max_depth=3)


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, {(1, 2): 3}, b"x", "\ud800", json.loads(lists(500))])
def test_what_json_cannot_say(value: Any) -> None:
    with pytest.raises(ValueError):
        written_and_read([value])


def test_what_is_nested_too_deeply_to_be_written() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="cannot be written"):
        write_json(deep)
    while deep:  # or taking it apart would recurse
        deep = deep.pop()


@given(st.text())
def test_a_string(text: str) -> None:
    assert json.loads(json_string(text)) == json.loads(json_string(text, ensure_ascii=False)) == text


def test_as_the_reader_gets_it() -> None:
    assert written_and_read({1: (2, 3)}) == {"1": [2, 3]}
