"""What form an answer must have, as each dialect says it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agentcache.answer_form import AnswerForm, CallableTool, Calls, Notation, TextForm
from agentcache.models.text.replies.format import ReplyFormat
from agentcache.report import FinishReason, Update
from tests.server.driver import chat, complete, post
from tests.server.fake_engine import MODEL, REPORT, FakeEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FLAT_SCHEMA = {"type": "json_schema", "name": "x", "schema": SCHEMA}
OBJECT = '{"type": "object"}'


def chat_tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | fields}


CHAT_TOOLS = [chat_tool("look"), chat_tool("now", parameters=None), chat_tool("sure", strict=True)]
FLAT_TOOLS = [
    {"type": "web_search"},
    {"type": "function", "name": "look", "parameters": SCHEMA},
    {"type": "function", "name": "now"},
]
THEIR_TOOLS = [{"name": "look", "input_schema": SCHEMA}, {"name": "now"}]


def text(param: str, notation: Notation = Notation.JSON_SCHEMA, definition: str = json.dumps(SCHEMA)) -> AnswerForm:
    return AnswerForm(TextForm(notation, definition, param))


def tool(
    index: int, name: str, schema: str = json.dumps(SCHEMA), inside: str = "function.", kind: str = "parameters"
) -> CallableTool:
    place = f"tools[{index}].{inside}"
    return CallableTool(name, schema, f"{place}{kind}", f"{place}name")


LOOK, NOW, SURE = tool(0, "look"), tool(1, "now", OBJECT), tool(2, "sure")
CHAT: list[tuple[dict[str, Any], AnswerForm | None]] = [
    ({"response_format": {"type": "text"}, "tools": CHAT_TOOLS, "tool_choice": "auto"}, None),
    ({"response_format": {"type": "json_object"}}, text("response_format", definition=OBJECT)),
    ({"response_format": CHAT_SCHEMA}, text("response_format.json_schema.schema")),
    ({"guided_json": SCHEMA}, text("guided_json")),
    ({"guided_regex": "a|b"}, text("guided_regex", Notation.REGEX, "a|b")),
    ({"guided_grammar": 'start: "a"'}, text("guided_grammar", Notation.LARK, 'start: "a"')),
    ({"guided_choice": ['a"', "b"]}, text("guided_choice", Notation.LARK, 'start: CHOICE\nCHOICE: "a\\"" | "b"')),
    ({"tools": CHAT_TOOLS, "tool_choice": "required"}, AnswerForm(calls=Calls((LOOK, NOW, SURE)))),
    (
        {"tools": CHAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        AnswerForm(calls=Calls((LOOK, NOW, SURE), just_one=True)),
    ),
    (
        {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
        AnswerForm(calls=Calls((NOW,), just_one=True)),
    ),
    (
        {"tools": CHAT_TOOLS, "response_format": CHAT_SCHEMA},
        AnswerForm(
            text("response_format.json_schema.schema").text,
            Calls((CallableTool("look", OBJECT, LOOK.param), CallableTool("now", OBJECT, NOW.param), SURE)),
        ),
    ),
    (
        {"tools": CHAT_TOOLS, "response_format": CHAT_SCHEMA, "tool_choice": "none"},
        text("response_format.json_schema.schema"),
    ),
]


@pytest.mark.parametrize(("fields", "form"), CHAT)
def test_chat(fields: dict[str, Any], form: AnswerForm | None) -> None:
    engine = FakeEngine()
    assert chat(engine, fields).status_code == 200
    assert engine.requests[0].form == form


def test_completions_have_texts_only() -> None:
    engine = FakeEngine()
    complete(engine, {"response_format": CHAT_SCHEMA, "n": 2})
    assert engine.requests[0].form == text("response_format.json_schema.schema")


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"text": {"format": FLAT_SCHEMA}}, text("text.format.schema")),
        ({"text": {"format": {"type": "json_object"}}}, text("text.format", definition=OBJECT)),
        (
            {"tools": FLAT_TOOLS, "tool_choice": "required"},
            AnswerForm(calls=Calls((tool(1, "look", inside=""), tool(2, "now", "{}", inside="")))),
        ),
        (
            {"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "look"}},
            AnswerForm(calls=Calls((tool(1, "look", inside=""),), just_one=True)),
        ),
    ],
)
def test_responses(fields: dict[str, Any], form: AnswerForm) -> None:
    engine = FakeEngine()
    answer = post(engine, "/v1/responses", {"input": "hi"} | fields)
    assert engine.requests[0].form == form
    assert answer.json()["text"]["format"] == fields.get("text", {"format": {"type": "text"}})["format"]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, text("output_config.format.schema")),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, text("output_format.schema")),
        (
            {"tools": THEIR_TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            AnswerForm(
                calls=Calls(
                    (tool(0, "look", inside="", kind="input_schema"), tool(1, "now", "{}", "", "input_schema")), True
                )
            ),
        ),
        (
            {"tools": THEIR_TOOLS, "tool_choice": {"type": "tool", "name": "now"}},
            AnswerForm(calls=Calls((tool(1, "now", "{}", "", "input_schema"),), True)),
        ),
    ],
)
def test_anthropic(fields: dict[str, Any], form: AnswerForm) -> None:
    engine = FakeEngine()
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    assert post(engine, "/v1/messages", body | fields).status_code == 200
    assert engine.requests[0].form == form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": CHAT_SCHEMA | {"json_schema": {"schema": []}}}, "response_format.json_schema.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": CHAT_TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": CHAT_TOOLS}, "tool_choice"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": CHAT_SCHEMA}, "guided_regex"),
        ({"guided_regex": "a", "tools": CHAT_TOOLS, "tool_choice": "required"}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{}"}, "guided_json"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    answer = chat(FakeEngine(), fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_model_without_a_dialect_calls_where_it_must() -> None:
    def calling(request: object) -> list[Update | float | Exception]:
        said = Update('{"name": "look", "parameters": {"a": 1}}', (1,))
        return [
            Update(prompt_token_ids=(1,), prompt_end=""),
            said,
            Update(finish_reason=FinishReason.STOP, report=REPORT),
        ]

    engine = FakeEngine(script=calling, model=replace(MODEL, reply_format=ReplyFormat()))
    [choice] = chat(engine, {"tools": CHAT_TOOLS, "tool_choice": "required"}).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    [choice] = chat(engine, {"tools": CHAT_TOOLS}).json()["choices"]
    assert choice["message"]["content"].startswith("{")  # nobody has demanded a call
