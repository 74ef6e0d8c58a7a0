"""Definitions of tools in every spelling, and tools that clients or servers run by themselves."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agentcache.api.answer_form import AnswerForm
from agentcache.api.request import ChatPrompt
from tests.server.driver import chat, post, refused
from tests.server.fake_engine import FakeEngine

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
SHOWN = {"type": "function", "function": FUNCTION}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
SPELLINGS: list[dict[str, Any]] = [
    SHOWN,
    {"function": FUNCTION},
    FUNCTION,
    {"type": "function"} | FUNCTION,
    {"name": "look", "description": "Looks.", "input_schema": SCHEMA},
    {"name": "look", "description": "Looks.", "inputSchema": SCHEMA},
]


def ask(path: str, tools: Any, **fields: Any) -> tuple[httpx.Response, FakeEngine]:
    engine = FakeEngine()
    body = {"input": "hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 5}
    return post(engine, path, body | {"tools": tools} | fields), engine


def shown(path: str, tools: Any, **fields: Any) -> Any:
    answer, engine = ask(path, tools, **fields)
    assert answer.status_code == 200, answer.text
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.tools


def notes(answer: httpx.Response) -> list[str]:
    return list(answer.json()["agentcache"]["notes"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("tool", SPELLINGS, ids=range(len(SPELLINGS)))
def test_every_dialect_reads_every_spelling(path: str, tool: dict[str, Any]) -> None:
    assert shown(path, [tool]) == [SHOWN]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_tools_that_a_server_runs_are_left_out_with_a_note(path: str) -> None:
    answer, engine = ask(path, [WEB, SHOWN], tool_choice="auto")
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tools == [SHOWN]
    assert notes(answer) == ["tools[0]: a tool of type 'web_search_20250305' was left out"]


@pytest.mark.parametrize(
    "choice", [{"type": "tool", "name": "web_search"}, {"type": "any"}, {"type": "web_search_20250305"}, "required"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_demand_for_such_a_tool_is_noted(path: str, choice: Any) -> None:
    answer, engine = ask(path, [WEB], tool_choice=choice)
    assert answer.status_code == 200 and engine.requests[0].form is None
    assert "tool_choice: it demands a tool that was left out" in notes(answer)[1]


CLIENT_TOOLS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "bash_20250124", "name": "bash"}, "bash", "command"),
    ({"type": "bash_20241022"}, "bash", "restart"),
    ({"type": "text_editor_20241022", "name": "str_replace_editor"}, "str_replace_editor", "old_str"),
    ({"type": "text_editor_20250124"}, "str_replace_editor", "path"),
    ({"type": "text_editor_20250728", "max_characters": 900}, "str_replace_based_edit_tool", "insert_text"),
    ({"type": "text_editor_20990101"}, "str_replace_based_edit_tool", "view_range"),
    ({"type": "memory_20250818", "name": "memory"}, "memory", "new_path"),
    ({"type": "computer_20241022", "display_width_px": 800, "display_height_px": 600}, "computer", "coordinate"),
    ({"type": "computer_20250124"}, "computer", "scroll_amount"),
    ({"type": "computer_20251124", "name": "computer"}, "computer", "region"),
]


@pytest.mark.parametrize(("tool", "name", "parameter"), CLIENT_TOOLS, ids=[each["type"] for each, *_ in CLIENT_TOOLS])
def test_tools_that_anthropics_clients_run_have_their_schemas(tool: dict[str, Any], name: str, parameter: str) -> None:
    answer, engine = ask("/v1/messages", [tool], tool_choice={"type": "tool", "name": name})
    assert answer.status_code == 200 and notes(answer) == []
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tools is not None
    [function] = [each["function"] for each in prompt.tools]
    assert function["name"] == name and parameter in function["parameters"]["properties"] and function["description"]
    form = engine.requests[0].form
    assert isinstance(form, AnswerForm) and form.calls is not None and form.calls.tools[0].name == name


def test_commands_and_actions_follow_the_version() -> None:
    def enum(kind: str, name: str) -> list[str]:
        [tool] = shown("/v1/messages", [{"type": kind}])
        return list(tool["function"]["parameters"]["properties"][name]["enum"])

    assert "undo_edit" in enum("text_editor_20250124", "command")
    assert "undo_edit" not in enum("text_editor_20250429", "command")
    assert "scroll" not in enum("computer_20241022", "action")
    assert "scroll" in enum("computer_20250124", "action") and "zoom" not in enum("computer_20250124", "action")
    assert "zoom" in enum("computer_20251124", "action")


@pytest.mark.parametrize(
    "tool", [{"type": "bash_20250124", "name": 5}, {"type": "text_editor_20250728", "max_characters": "x"}]
)
def test_wrong_values_of_theirs_are_named(tool: dict[str, Any]) -> None:
    answer, _ = ask("/v1/messages", [tool])
    assert answer.status_code == 400 and "tools[0]." in answer.json()["error"]["message"]


def addition(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": tool}


def test_tools_that_a_system_message_adds() -> None:
    """As Claude Code sends them; references name entries of `tools`, which are shown anyway."""
    added = {"name": "later", "description": "Comes later.", "input_schema": SCHEMA}
    blocks = [
        {"type": "text", "text": "Mind the tools."},
        addition({"type": "tool_definition", "definition": added}),
        addition({"type": "tool_reference", "name": "look"}),
        addition({"type": "tool_definition", "definition": WEB}),
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}},
    ]
    messages = [*HI, {"role": "system", "content": blocks}]
    tools = [FUNCTION | {"defer_loading": True}]
    answer, engine = ask("/v1/messages", tools, messages=messages)
    assert answer.status_code == 200
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tools is not None
    assert [tool["function"]["name"] for tool in prompt.tools] == ["look", "later"]
    [_, system] = prompt.messages
    assert system["role"] == "system" and "Mind the tools." in system["content"] and "'look'" in system["content"]
    counted = post(engine, "/v1/messages/count_tokens", {"messages": messages, "tools": tools})
    assert counted.status_code == 200


def test_only_additions_make_no_system_message() -> None:
    message = {"role": "system", "content": [addition({"type": "tool_reference", "name": "look"})]}
    _, engine = ask("/v1/messages", [FUNCTION], messages=[message, *HI])
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.messages == HI


def test_tools_that_items_of_the_input_add() -> None:
    """As Codex sends all of its tools, again in every turn."""
    patch = {"type": "custom", "name": "patch", "description": "Patches."}
    space = {"type": "namespace", "name": "n", "tools": [{"type": "function"} | FUNCTION]}
    item = {
        "type": "additional_tools",
        "tools": [{"type": "function"} | FUNCTION, patch, {"type": "web_search"}, space],
    }
    answer, engine = ask("/v1/responses", [], input=[item, {"role": "user", "content": "hi"}, item])
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tools is not None and prompt.messages == HI
    assert [tool["function"]["name"] for tool in prompt.tools] == ["look", "patch", "n__look"]
    assert all("web_search" in note for note in notes(answer))


def test_tools_that_a_search_has_found() -> None:
    found = {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function"} | FUNCTION]}
    call = {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "sky"}, "execution": "client"}
    answer, engine = ask("/v1/responses", [], input=[{"role": "user", "content": "hi"}, call, found])
    prompt = engine.requests[0].prompt
    assert answer.status_code == 200
    assert isinstance(prompt, ChatPrompt) and prompt.tools is not None
    assert [tool["function"]["name"] for tool in prompt.tools] == ["look"]
    [_, said, brought] = prompt.messages
    assert said["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": {"query": "sky"}}
    assert brought["role"] == "tool" and "look" in brought["content"]


@pytest.mark.parametrize(("path", "schema"), [("/v1/messages", "input_schema"), ("/v1/responses", "parameters")])
def test_an_empty_schema_may_be_a_list(path: str, schema: str) -> None:
    """PHP writes empty objects so."""
    answer, engine = ask(path, [{"name": "now", schema: []}])
    prompt = engine.requests[0].prompt
    assert answer.status_code == 200
    assert isinstance(prompt, ChatPrompt) and prompt.tools is not None
    assert prompt.tools[0]["function"]["parameters"] == {}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("name", [["x"], {}, 5])
@pytest.mark.parametrize("holder", [lambda name: {"name": name}, lambda name: {"function": {"name": name}}])
def test_tools_that_are_left_out_may_be_called_anything(path: str, name: Any, holder: Any) -> None:
    answer, engine = ask(path, [{"type": "web_search"} | holder(name), FUNCTION], tool_choice="required")
    assert answer.status_code == 200, answer.text
    form = engine.requests[0].form
    assert form is not None and form.calls is not None and [tool.name for tool in form.calls.tools] == ["look"]


def test_custom_tools_of_chat_are_refused_by_name() -> None:
    error = refused(chat(FakeEngine(), {"tools": [{"type": "custom", "custom": {"name": "x"}}]}), 400)
    assert error["param"] == "tools[0].type" and "/v1/responses" in error["message"]
