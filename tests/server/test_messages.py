from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.datastructures import Headers

from agentcache.server.context import Call
from agentcache.server.messages import read_messages
from agentcache.server.validate import Reader
from agentcache.settings.config import Config
from tests.server.fake_engine import MODEL


def read(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return read_messages(Call(Reader({"messages": list(messages)}), Headers(), MODEL, Config()))


@pytest.mark.parametrize(
    ("given", "meant"),
    [("developer", "system"), ("system", "system"), ("user", "user"), ("tool", "tool"), ("function", "tool")],
)
def test_roles(given: str, meant: str) -> None:
    assert read({"role": given, "content": "x"}) == [{"role": meant, "content": "x"}]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"role": "user", "content": parts}) == [{"role": "user", "content": "ab"}]
    assert read({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_an_assistant_may_have_said_nothing(fields: dict[str, Any]) -> None:
    assert read({"role": "assistant", **fields}) == [{"role": "assistant", "content": ""}]


def test_calls_have_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    [message] = read({"role": "assistant", "content": None, "tool_calls": [call], "refusal": None})
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }


@pytest.mark.parametrize(
    "arguments",
    ["not json", "[1]", "[" * 100_000, '{"x": ' + "[" * 500 + "]" * 500 + "}", r'{"x": "\ud800"}'],
    ids=["text", "list", "brackets", "nested", "surrogate"],
)
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = read({"role": "assistant", "content": "x", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "call",
    [
        {"id": "1", "type": "tool_call", "name": "f", "args": {"x": 1}},
        {"id": "1", "type": "function", "name": "f", "arguments": '{"x": 1}'},
    ],
)
def test_calls_as_frameworks_keep_them(call: dict[str, Any]) -> None:
    [message] = read({"role": "assistant", "content": "x", "tool_calls": [call]})
    [read_call] = message["tool_calls"]
    assert read_call == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize("function", [None, {}, {"name": None, "arguments": "{}"}])
def test_a_call_without_a_name_does_not_end_the_conversation(function: Any) -> None:
    said = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    [message, _] = read(said, {"role": "tool", "tool_call_id": "1", "content": "no such tool"})
    assert message["tool_calls"][0]["function"] == {"name": "", "arguments": {}}


def test_a_former_call_and_its_result_are_a_pair() -> None:
    function = {"name": "f", "arguments": '{"x": 1}'}
    said, result = read(
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "f", "content": "y"},
    )
    called = {"id": "call_f", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert said == {"role": "assistant", "content": "", "tool_calls": [called]}
    assert result == {"role": "tool", "name": "f", "content": "y", "tool_call_id": "call_f"}


def test_a_custom_call_has_its_text_as_argument() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** x"}}
    [message] = read({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "*** x"}}


@pytest.mark.parametrize("arguments", [[1], 5, True])
def test_arguments_of_other_types_are_text(arguments: object) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = read({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == json.dumps(arguments)


def test_other_fields_reach_the_template() -> None:
    message = {"role": "tool", "content": "x", "tool_call_id": "1", "name": "f"}
    assert read(message) == [message]
