"""Lookup tables: what a call looks like, and that nothing an agent writes can break a run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.workflow.tools import NO_CALL, LookupTable, ToolCall, find_calls, run_call

BOOK = LookupTable("lookup", "Where each ship lies.", {"Cedar": "north pier", "Swan": "quay"})


def call_of(text: str) -> str:
    return f"I look.\n<tool_call>\n{text}\n</tool_call>"


def test_the_definition_is_what_templates_take() -> None:
    assert BOOK.definition() == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Where each ship lies.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }


def test_a_call_is_found_and_looked_up() -> None:
    [call] = find_calls(call_of('{"name": "lookup", "arguments": {"key": " cedar "}}'))
    assert call is not None and (call.name, call.arguments) == ("lookup", {"key": " cedar "})
    assert run_call(call, [BOOK]) == "north pier"


def test_all_calls_of_an_answer_in_order() -> None:
    answer = call_of('{"name": "lookup", "arguments": {"key": "Swan"}}') + call_of("x") + "<tool_call>{}"
    assert [run_call(call, [BOOK]) for call in find_calls(answer)] == ["quay", NO_CALL]


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ('{"name": "lookup", "arguments": {"key": "Ceder"}}', 'no entry for "Ceder"'),
        ('{"name": "lookup", "arguments": {"ship": "Cedar"}}', NO_CALL),
        ('{"name": "lookup", "arguments": {"key": "Cedar", "more": 1}}', NO_CALL),
        ('{"name": "lookup", "arguments": {"key": ["Cedar"]}}', NO_CALL),
        ('{"name": "lookup", "arguments": "Cedar"}', NO_CALL),
        ('{"name": "lookup"}', NO_CALL),
        ('{"name": "rm", "arguments": {"key": "Cedar"}}', NO_CALL),
        ('{"name": 3, "arguments": {}}', NO_CALL),
        ("[]", NO_CALL),
        ("", NO_CALL),
        ("[" * 100_000, NO_CALL),
    ],
)
def test_calls_that_come_to_nothing(text: str, outcome: str) -> None:
    assert [run_call(call, [BOOK]) for call in find_calls(call_of(text))] == [outcome]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner)))
def test_any_argument_has_an_outcome(argument: Any) -> None:
    assert run_call(ToolCall("lookup", {"key": argument}), [BOOK])


def test_the_same_call_in_other_letters() -> None:
    wanted = ToolCall("lookup", {"key": "north  Pier"})
    assert wanted.same_as(ToolCall("lookup", {"key": "North pier"}))
    assert not wanted.same_as(ToolCall("Lookup", {"key": "north pier"}))
    assert not wanted.same_as(ToolCall("lookup", {"key": "pier"}))
    assert not wanted.same_as(ToolCall("lookup", {"key": "north pier", "n": 1}))
