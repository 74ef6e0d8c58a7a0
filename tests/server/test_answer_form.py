"""What form an answer must have, as each dialect says it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agentcache.api.answer_form import AnswerForm, CallableTool, Calls, Notation, TextForm
from agentcache.api.model import ReplyFormat
from agentcache.api.report import FinishReason, Update
from agentcache.api.request import ChatPrompt
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


ANY_OF_THESE = AnswerForm(calls=Calls((LOOK, NOW, SURE)))
JUST_NOW = AnswerForm(calls=Calls((NOW,), just_one=True))
SPELLINGS: list[tuple[dict[str, Any], AnswerForm | None]] = [
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, text("response_format.schema")),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, text("response_format.schema")),
    ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, text("response_format.json_schema")),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
        text("response_format.json_schema.schema"),
    ),
    ({"response_format": {"type": "json", "value": SCHEMA}}, text("response_format.value")),
    ({"response_format": {"type": "json_object", "schema": None}}, text("response_format", definition=OBJECT)),
    ({"response_format": {"type": "regex", "value": "a|b"}}, text("response_format.value", Notation.REGEX, "a|b")),
    ({"response_format": None, "structured_outputs": None, "guided_json": None, "format": ""}, None),
    ({"structured_outputs": {"json": SCHEMA}}, text("structured_outputs.json")),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, text("structured_outputs.json")),
    ({"structured_outputs": {"json_object": True}}, text("structured_outputs.json_object", definition=OBJECT)),
    (
        {"structured_outputs": {"json_object": False, "regex": "a"}},
        text("structured_outputs.regex", Notation.REGEX, "a"),
    ),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        text("structured_outputs.choice", Notation.LARK, 'start: CHOICE\nCHOICE: "a" | "b"'),
    ),
    (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        text("structured_outputs.grammar", Notation.LARK, 'start: "a"'),
    ),
    ({"guided_json": json.dumps(SCHEMA)}, text("guided_json")),
    ({"json_schema": SCHEMA}, text("json_schema")),
    ({"json_schema": json.dumps(SCHEMA)}, text("json_schema")),
    ({"regex": "a|b"}, text("regex", Notation.REGEX, "a|b")),
    ({"format": "json"}, text("format", definition=OBJECT)),
    ({"format": SCHEMA}, text("format")),
    ({"output_config": {"format": FLAT_SCHEMA}}, text("output_config.format.schema")),
    *(
        ({"tools": CHAT_TOOLS, "tool_choice": choice}, ANY_OF_THESE)
        for choice in ("any", "required", {"type": "any"}, {"type": "required"})
    ),
    *(
        ({"tools": CHAT_TOOLS, "tool_choice": choice}, None)
        for choice in (None, "", "auto", "none", {"type": "auto"}, {"type": "none"}, {})
    ),
    *(
        ({"tools": CHAT_TOOLS, "tool_choice": choice}, JUST_NOW)
        for choice in (
            "now",
            {"type": "tool", "name": "now"},
            {"type": "function", "name": "now"},
            {"type": "function", "function": {"name": "now"}},
            {"function": {"name": "now"}},
            {"name": "now"},
        )
    ),
    (
        {
            "tools": CHAT_TOOLS,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
        AnswerForm(calls=Calls((LOOK, NOW, SURE), just_one=True)),
    ),
    (
        {
            "tools": CHAT_TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [chat_tool("now"), chat_tool("sure")]},
            },
        },
        AnswerForm(calls=Calls((NOW, SURE))),
    ),
]


@pytest.mark.parametrize(("fields", "form"), CHAT + SPELLINGS)
def test_chat(fields: dict[str, Any], form: AnswerForm | None) -> None:
    engine = FakeEngine()
    assert chat(engine, fields).status_code == 200
    assert engine.requests[0].form == form


@pytest.mark.parametrize("choice", ["any", {"type": "any"}, {"type": "tool", "name": "look"}, "look"])
def test_every_dialect_reads_every_choice(choice: Any) -> None:
    engine = FakeEngine()
    post(engine, "/v1/responses", {"input": "hi", "tools": FLAT_TOOLS, "tool_choice": choice})
    hi = [{"role": "user", "content": "hi"}]
    post(engine, "/v1/messages", {"max_tokens": 5, "messages": hi, "tools": THEIR_TOOLS, "tool_choice": choice})
    forms = [request.form for request in engine.requests]
    assert len(forms) == 2 and all(form is not None and form.calls is not None for form in forms)


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/v1/chat/completions", chat_tool("look", strict=True)),
        ("/v1/chat/completions", chat_tool("look") | {"strict": True}),
        ("/v1/chat/completions", chat_tool("look", strict=None) | {"strict": True}),
        ("/v1/messages", {"name": "look", "input_schema": SCHEMA, "strict": True}),
        ("/v1/responses", {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}),
        ("/v1/responses", chat_tool("look", strict=True)),
        (
            "/v1/responses",
            {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]},
        ),
    ],
)
@pytest.mark.parametrize("is_strict", [True, False])
def test_every_dialect_obeys_strict(path: str, tool: dict[str, Any], is_strict: bool) -> None:
    """Arguments of strict tools follow their schema; those of others are any object."""
    said = json.dumps(tool).replace('"name": "look"', '"name": "look", "strict": true').replace('"strict": null, ', "")
    given = json.loads(said.replace('"strict": true', f'"strict": {json.dumps(is_strict)}'))
    engine = FakeEngine()
    hi = [{"role": "user", "content": "hi"}]
    body = {"input": hi} if path == "/v1/responses" else {"messages": hi, "max_tokens": 5}
    form = {"output_config": {"format": FLAT_SCHEMA}}
    assert post(engine, path, body | form | {"tools": [given]}).status_code == 200
    demanded = engine.requests[0].form
    assert demanded is not None and demanded.calls is not None
    assert [tool.schema for tool in demanded.calls.tools] == [json.dumps(SCHEMA) if is_strict else OBJECT]


BASH = {"type": "bash_20250124", "name": "bash"}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "bash_20250124"}, "bash"),
        ({"type": "bash_20241022"}, "bash"),
        ({"type": "bash"}, "bash"),
        ({"type": "tool", "name": "bash_20250124"}, "bash"),
        ({"type": "function", "function": {"name": "bash_20250124"}}, "bash"),
        ("bash_20250124", "bash"),
        ({"type": "text_editor_20250728"}, EDITOR["name"]),
        ({"type": "tool", "name": "text_editor"}, EDITOR["name"]),
        ({"type": "tool", "name": "str_replace_editor"}, EDITOR["name"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "bash_20250124"}]}, "bash"),
        ({"type": "look"}, "look"),
        ({"type": "web_search_20250305"}, None),
        ({"type": "web_search"}, None),
        ({"type": "web_search_preview_2025_03_11"}, None),
        ({"type": "tool", "name": "web_search"}, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_tools_are_chosen_by_type_or_name(path: str, choice: Any, name: str | None) -> None:
    """A tool of the server is left out, and a choice of it is noted."""
    engine = FakeEngine()
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    tools = [BASH, EDITOR, SEARCH, THEIR_TOOLS[0]]
    answer = post(engine, path, body | {"tools": tools, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    form = engine.requests[0].form
    named = None if form is None or form.calls is None else [tool.name for tool in form.calls.tools]
    assert named == (None if name is None else [name])
    is_noted = any("demands a tool that was left out" in note for note in answer.json()["agentcache"]["notes"])
    assert is_noted == (name is None)


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "web_search_preview_2025_03_11"])
def test_hosted_tools_are_chosen_by_any_version(kind: str) -> None:
    engine = FakeEngine()
    tools = [{"type": "web_search_preview"}, {"type": "mcp", "server_label": "a"}, FLAT_TOOLS[1]]
    for choice in ({"type": kind}, {"type": "mcp", "server_label": "a", "name": "b"}):
        answer = post(engine, "/v1/responses", {"input": "hi", "tools": tools, "tool_choice": choice})
        assert answer.status_code == 200 and engine.requests[-1].form is None
    answer = post(engine, "/v1/responses", {"input": "hi", "tools": tools, "tool_choice": {"type": "file_search"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice.type")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize(("fields", "form"), [pair for pair in SPELLINGS if "tools" not in pair[0]][::4])
def test_every_dialect_reads_every_form(path: str, fields: dict[str, Any], form: AnswerForm | None) -> None:
    engine = FakeEngine()
    hi = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = (
        {"input": "hi"} if path == "/v1/responses" else {"messages": hi, "max_tokens": 5, "prompt": "hi"}
    )
    assert post(engine, path, body | fields).status_code == 200
    assert engine.requests[0].form == form


def test_allowed_tools_are_the_only_ones_shown() -> None:
    engine = FakeEngine()
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    chat(engine, {"tools": CHAT_TOOLS, "tool_choice": allowed})
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tools == [CHAT_TOOLS[1]]


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
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": SCHEMA}, "structured_outputs.regex"),
        ({"response_format": CHAT_SCHEMA, "format": "json"}, "format"),
        ({"response_format": CHAT_SCHEMA, "output_format": FLAT_SCHEMA}, "output_format.schema"),
        ({"tool_choice": "look"}, "tool_choice"),
        ({"tool_choice": {"type": "hologram"}, "tools": CHAT_TOOLS}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "some", "tools": []}}, "tool_choice.mode"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    answer = chat(FakeEngine(), fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_model_without_a_dialect_calls_as_its_tools_are_told() -> None:
    def calling(request: object) -> list[Update | float | Exception]:
        said = Update('<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>', (1,))
        return [
            Update(prompt_token_ids=(1,), prompt_end=""),
            said,
            Update(finish_reason=FinishReason.STOP, report=REPORT),
        ]

    engine = FakeEngine(script=calling, model=replace(MODEL, reply_format=ReplyFormat()))
    for choice_of_tools in ("required", "auto"):
        [choice] = chat(engine, {"tools": CHAT_TOOLS, "tool_choice": choice_of_tools}).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    [choice] = chat(engine, {}).json()["choices"]
    assert choice["message"]["content"].startswith("<tool_call>")  # no tools, no calls
