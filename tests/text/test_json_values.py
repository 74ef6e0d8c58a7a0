from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentcache.text.json_values import (
    MAX_DEPTH,
    TooDeep,
    canonical_json,
    deep_place,
    json_string,
    parse_json,
    write_json,
    written_and_read,
)

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


@pytest.mark.parametrize(
    ("text", "value"), [("1e400", 1.7976931348623157e308), ("[-1e400]", [-1.7976931348623157e308]), ("1e-400", 0.0)]
)
def test_a_number_out_of_range_becomes_one_that_json_can_say(text: str, value: Any) -> None:
    assert parse_json(text) == value
    assert written_and_read(parse_json(text)) == value
    assert parse_json(canonical_json(parse_json(text))) == value


def are_equal(one: Any, other: Any) -> bool:
    """Equality with types."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


few = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, 2**60, 2.0**60, "1", "\u212b", "\u00c5", "true", ""]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "\u00e9"]), inner, max_size=2)
    ),
    max_leaves=3,
)


@given(few, few)
def test_canonical_texts_are_equal_for_equal_values_only(one: Any, other: Any) -> None:
    assert (canonical_json(one) == canonical_json(other)) == are_equal(one, other)


@given(values)
def test_canonical_json_is_json(value: Any) -> None:
    assert are_equal(parse_json(canonical_json(value)), value)
    assert canonical_json(parse_json(canonical_json(value))) == canonical_json(value)


def test_what_has_no_canonical_json() -> None:
    for value in (object(), {1: 2, "1": 3}, {b"": 1}):
        with pytest.raises(ValueError, match="cannot be written"):
            canonical_json(value)


def test_of_equal_keys_the_last_one_counts() -> None:
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}


def test_a_text_that_is_too_long() -> None:
    assert parse_json("[1, 2]", max_chars=6) == [1, 2]
    with pytest.raises(ValueError, match="more than 5 characters"):
        parse_json("[1, 2]", max_chars=5)


@example({"": []}, 1)
@given(values, st.integers(0, 6))
def test_what_is_too_deep_has_a_place(value: Any, most: int) -> None:
    """Exactly what has more levels is refused, and the place is where a step deeper would be too deep."""
    text = json.dumps(value)
    if depth_of(value) <= most:
        assert parse_json(text, max_depth=most) == value and not deep_place(text, max_depth=most)
        return
    with pytest.raises(TooDeep):
        parse_json(text, max_depth=most)
    assert (deep_place(text, max_depth=most) == "") == (most == 0)


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


@pytest.mark.parametrize(
    ("text", "most", "place"),
    [
        ('{"a": [[1], [[2]]]}', 3, "a[1][0]"),
        ('{"a": {"b": 1}, "c": {"d\\"]": {"e": {}}}}', 3, 'c.d\\"].e'),
        ('["[[[[", {"x": "y", "z": [{}]}]', 3, "[1].z[0]"),
        ('{"a": [{"b": [{"c": [{"d": []}]}]}]}', 7, "a[0].b[0].c[0]"),
    ],
)
def test_places(text: str, most: int, place: str) -> None:
    assert deep_place(text, max_depth=most) == place


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


def test_halves_of_pairs_are_mended_where_asked_for() -> None:
    assert parse_json(r'[{"\uDFFF": "a\ud800", "b": 1}]', mends_halves=True) == [{"\ufffd": "a\ufffd", "b": 1}]
    assert parse_json(r'"\ud83d\ude00"', mends_halves=True) == "😀"


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
