from __future__ import annotations

import json
from typing import Any

import pytest

from agentcache.errors import ContextLengthExceeded, InvalidRequest
from agentcache.server.validate import (
    MANY_VALUES,
    Reader,
    check_agent_id,
    parse_object,
    refuse_long_lists,
    refuse_many_values,
)
from agentcache.text.json_values import MAX_DEPTH


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "too many digits"),
    ],
)
def test_bodies_that_are_no_json_object(raw: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        parse_object([raw])
    assert caught.value.code == "invalid_json"


def test_half_a_surrogate_pair_is_a_replacement_character() -> None:
    """Clients cut texts by UTF-16 units, and keep what they have cut in the history."""
    assert parse_object([b'{"a": "x\\ud83d"}']) == {"a": "x\ufffd"}
    raw = b'{"a": ["\\ude00\\ud83d", {"\\uDFFF": [[]], "b": 1.5}], "c": "\\ud83d\\ude00"}'
    assert parse_object([raw]) == {"a": ["\ufffd\ufffd", {"\ufffd": [[]], "b": 1.5}], "c": "😀"}


def test_pairs_of_surrogate_escapes_are_a_character() -> None:
    assert parse_object([json.dumps({"a": "😀"}).encode()]) == {"a": "😀"}


@pytest.mark.parametrize("levels", [MAX_DEPTH, 100_000])
def test_a_refusal_says_what_is_nested_too_deeply(levels: int) -> None:
    """A client that keeps it in its history finds it by that."""
    deep = "[" * levels + "]" * levels
    call = '{"function": {"name": "f\\"}", "arguments": ' + deep + "}}"
    body = f'{{"model": "x, [y]", "messages": [{{"content": "a: [b"}}, {{"tool_calls": [{call}]}}]}}'
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        parse_object([body.encode()])
    assert "'messages[1].tool_calls[0].function.arguments'" in caught.value.message or levels > MAX_DEPTH
    assert "'messages[1].tool_calls[0]" in caught.value.message


def test_nesting_up_to_the_limit_is_read() -> None:
    depth = MAX_DEPTH - 2
    assert parse_object([b'{"a": ' + b"[" * depth + b"]" * depth + b"}"])


def test_more_values_than_any_prompt_needs() -> None:
    many = MANY_VALUES * b"1,"
    with pytest.raises(ContextLengthExceeded):
        refuse_many_values(b'{"prompt": [' + many + b"1]}", 32768)
    refuse_many_values(b'{"prompt": [' + many + b"1]}", MANY_VALUES)  # a context that holds them
    refuse_many_values(b'{"prompt": [' + b"[1]," * 100 + b"[" + many + b"1]]}", 32768)  # a hundred prompts
    refuse_many_values(b'{"prompt": "' + b"no values " * MANY_VALUES + b'"}', 32768)


def test_lists_that_are_longer_than_the_context() -> None:
    for param in ("prompt", "messages"):
        refuse_long_lists({param: [1] * 100}, 100)
        refuse_long_lists({param: "x" * 101}, 100)
        with pytest.raises(ContextLengthExceeded) as refused:
            refuse_long_lists({param: [1] * 101}, 100)
        assert refused.value.param == param


def test_tool_results_are_messages() -> None:
    """Each has a message of its own in the prompt."""

    def body(kind: str, count: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [{"type": kind}] * count}]}

    refuse_long_lists(body("tool_result", 100), 100)
    refuse_long_lists(body("text", 101), 100)
    with pytest.raises(ContextLengthExceeded) as refused:
        refuse_long_lists(body("tool_result", 101), 100)
    assert refused.value.param == "messages" and "101 tool calls and results" in refused.value.message


def test_tool_calls_are_tokens() -> None:
    """However short they are, and whatever the template shows of them."""

    def body(calls: int, blocks: int) -> dict[str, Any]:
        uses = [{"type": "tool_use"}] * blocks
        return {"messages": [{"role": "assistant", "tool_calls": [{}] * calls}, {"role": "assistant", "content": uses}]}

    refuse_long_lists(body(60, 40), 100)
    refuse_long_lists({"messages": [{"tool_calls": 7}, {"content": 7}, 7]}, 100)
    for calls, blocks in ((101, 0), (0, 101), (60, 41)):
        with pytest.raises(ContextLengthExceeded, match="101 tool calls"):
            refuse_long_lists(body(calls, blocks), 100)


@pytest.mark.parametrize("value", ["a", "A.b_c-9", "x" * 64, "...", ".a"])
def test_agent_ids(value: str) -> None:
    assert check_agent_id(value, "agent") == value


@pytest.mark.parametrize("value", ["", ".", "..", "a/b", "../x", "x" * 65, "é", "a\n", "a b", "a\x00"])
def test_ids_that_could_not_name_a_file(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_agent_id(value, "agent")
    assert caught.value.param == "agent"


@pytest.mark.parametrize(
    ("read", "param"),
    [
        (lambda body: body.string("number"), "number"),
        (lambda body: body.required_string("absent"), "absent"),
        (lambda body: body.boolean("number"), "number"),
        (lambda body: body.integer("flag", minimum=0), "flag"),
        (lambda body: body.integer("fraction", minimum=0), "fraction"),
        (lambda body: body.integer("number", minimum=2), "number"),
        (lambda body: body.integer("huge", minimum=0), "huge"),
        (lambda body: body.number("flag", 0.0, minimum=0), "flag"),
        (lambda body: body.number("huge", 0.0, minimum=0), "huge"),
        (lambda body: body.number("infinite", 0.0, minimum=0), "infinite"),
        (lambda body: body.number("text", 0.0, minimum=0), "text"),
        (lambda body: body.object("number"), "number"),
        (lambda body: body.objects("object"), "object"),
        (lambda body: body.objects("list"), "list[1]"),
        (lambda body: body.objects("list_of_objects")[0].required_string("a"), "list_of_objects[0].a"),
        (lambda body: body.object("object").string("inner"), "object.inner"),
    ],
)
def test_wrong_types_name_the_parameter(read: object, param: str) -> None:
    values = {
        "number": 1,
        "flag": True,
        "fraction": 1.5,
        "huge": 10**400,
        "infinite": float("inf"),
        "text": "x",
        "object": {"inner": 1},
        "list": [{}, 1],
        "list_of_objects": [{}],
    }
    with pytest.raises(InvalidRequest) as caught:
        read(Reader(values))  # type: ignore[operator]
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "minimum", "maximum", "problem"),
    [
        ("9223372036854775808", 0, None, "at most 9223372036854775807"),
        ("1" + "0" * 400, 0, None, "at most 9223372036854775807"),
        ("-1", 0, None, "at least 0"),
        ("5", 0, 4, "between 0 and 4"),
        ("1e400", 0, None, "at most 9223372036854775807"),
        ("true", 0, None, "a whole number"),
    ],
)
def test_a_whole_number_out_of_range_is_told_the_bound_it_passed(
    text: str, minimum: int, maximum: int | None, problem: str
) -> None:
    body = Reader(parse_object([f'{{"a": {text}}}'.encode()]))
    bounds: dict[str, Any] = {"minimum": minimum} | ({} if maximum is None else {"maximum": maximum})
    with pytest.raises(InvalidRequest, match=f"a must be {problem}"):
        body.integer("a", **bounds)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1e400", r"at most 1e\+300"),
        ("1" + "0" * 400, r"at most 1e\+300"),
        ("-1e400", "at least 0"),
        ("-0.5", "at least 0"),
        ("false", "a number"),
    ],
)
def test_a_number_out_of_range_is_told_the_bound_it_passed(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"a must be {problem}"):
        Reader(parse_object([f'{{"a": {text}}}'.encode()])).number("a", 1.0, minimum=0)


def test_null_counts_as_absent() -> None:
    body = Reader({"a": None})
    assert body.string("a") is None
    assert body.boolean("a", True) is True
    assert body.integer("a", minimum=0) is None
    assert body.number("a", 0.5, minimum=0) == 0.5
    assert body.object("a").value == {}
    assert body.objects("a") == []


def test_unknown_keys_hint_at_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'report'") as caught:
        Reader({"reprot": True}, "agentcache").only("report", "salt")
    assert caught.value.param == "agentcache.reprot"
