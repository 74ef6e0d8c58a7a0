"""Custom tools and namespaces in `/v1/responses`, and log probabilities of what is said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseCustomToolCall, ResponseFunctionToolCall

from agentcache.api.report import FinishReason, TokenLogprob, Update
from agentcache.api.request import ChatPrompt, Request
from tests.server.fake_engine import REPORT, FakeEngine
from tests.server.responses_driver import CALLER, messages_of, respond, stream

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPAWN = {"type": "function", "name": "spawn", "description": "Begins one.", "parameters": {"type": "object"}}
TOOLS = [PATCH, {"type": "namespace", "name": "agents", "description": "Others.", "tools": [SPAWN, PATCH]}]
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def saying(*pieces: str) -> FakeEngine:
    def script(request: Request) -> list[Update | float | Exception]:
        said = [Update(piece, (1,)) for piece in pieces]
        return [
            Update(prompt_token_ids=(1,), prompt_end=""),
            *said,
            Update(finish_reason=FinishReason.STOP, report=REPORT),
        ]

    return FakeEngine(script=script, model=CALLER)


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_what_the_model_is_shown() -> None:
    engine = saying("Hi")
    answer = respond(engine, {"tools": TOOLS}).json()
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.tools is not None
    patch = "Patches.\n\nThe input follows this lark grammar:\nstart: /.+/"
    assert [tool["function"] for tool in prompt.tools] == [
        {"name": "apply_patch", "description": patch, "parameters": FREE_TEXT},
        {"name": "agents__spawn", "description": "Begins one.", "parameters": {"type": "object"}},
        {"name": "agents__apply_patch", "description": patch, "parameters": FREE_TEXT},
    ]
    assert answer["tools"] == TOOLS and answer["agentcache"]["notes"] == []
    Response.model_validate(answer)


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("apply_patch", {"input": "*** é\n"}, {"type": "custom_tool_call", "name": "apply_patch", "input": "*** é\n"}),
        ("apply_patch", {"patch": 1}, {"type": "custom_tool_call", "name": "apply_patch", "input": '{"patch": 1}'}),
        (
            "agents__apply_patch",
            {"input": "x"},
            {"type": "custom_tool_call", "name": "apply_patch", "namespace": "agents", "input": "x"},
        ),
        (
            "agents__spawn",
            {"a": 1},
            {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": '{"a": 1}'},
        ),
    ],
)
def test_calls_are_told_in_the_clients_terms(name: str, arguments: Any, item: dict[str, Any]) -> None:
    text = call(name, arguments)
    answer = respond(saying(text), {"tools": TOOLS}).json()
    [whole] = answer["output"]
    kind = ResponseCustomToolCall if item["type"] == "custom_tool_call" else ResponseFunctionToolCall
    kind.model_validate(whole)
    assert whole == item | {name: whole[name] for name in ("id", "call_id", "status")}
    assert whole["status"] == "completed"
    events = stream(respond(saying(*text), {"tools": TOOLS, "stream": True}))  # a character at a time
    [streamed] = events[-1]["response"]["output"]
    assert {**streamed, "id": 0, "call_id": 0} == {**whole, "id": 0, "call_id": 0}
    said = [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert "".join(said) == whole.get("input", whole.get("arguments"))


def test_calls_come_back_as_the_model_made_them() -> None:
    engine = saying("Hi")
    items = [
        {"role": "user", "content": "Patch it."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "***"},
        {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": "begun"},
    ]
    assert respond(engine, {"input": items, "tools": TOOLS}).status_code == 200
    _, reply, *results = messages_of(engine)
    assert [made["function"] for made in reply["tool_calls"]] == [
        {"name": "apply_patch", "arguments": {"input": "***"}},
        {"name": "agents__spawn", "arguments": {}},
    ]
    assert [(result["tool_call_id"], result["content"]) for result in results] == [("c1", "done"), ("c2", "begun")]


def token(text: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(1, text.encode(), logprob, top=((1, text.encode(), logprob), (2, b"other", -9.0)))


def thinking_engine() -> FakeEngine:
    """Thinks, then says four tokens, of which the second shows its text with the third; the last is no text."""

    def script(request: Request) -> list[Update | float | Exception]:
        pieces = ["<think>", "Hm", "</think>", "\n\n", "One", "", " two", " three"]
        names = ["<think>", "Hm", "</think>", "\n\n", "One", " t", "wo", " three"]
        said = [
            Update(piece, (1,), logprobs=(token(name, -float(number)),))
            for number, (piece, name) in enumerate(zip(pieces, names, strict=True))
        ]
        end = TokenLogprob(3, b"<|im_end|>", -0.5, shown=False)
        begin = Update(prompt_token_ids=(1,), prompt_end="")
        return [begin, *said, Update(token_ids=(3,), logprobs=(end,), finish_reason=FinishReason.STOP, report=REPORT)]

    return FakeEngine(script=script, model=CALLER)


def test_log_probabilities_of_what_is_said() -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    engine = thinking_engine()
    answer = respond(engine, body).json()
    assert engine.requests[0].sampling.logprobs == 2 and answer["top_logprobs"] == 2
    Response.model_validate(answer)
    thought, message = answer["output"]
    [part] = message["content"]
    assert part["text"] == "One two three"
    assert [(each["token"], each["logprob"]) for each in part["logprobs"]] == [
        ("One", -4.0),
        (" t", -5.0),
        ("wo", -6.0),
        (" three", -7.0),
    ]
    assert part["logprobs"][0]["top_logprobs"][1] == {"token": "other", "logprob": -9.0, "bytes": list(b"other")}
    assert "logprobs" not in thought["content"][0]
    events = stream(respond(thinking_engine(), body | {"stream": True}))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each["token"] for event in deltas for each in event["logprobs"]] == ["One", " t", "wo", " three"]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]


def test_log_probabilities_are_sent_where_they_are_asked_for_only() -> None:
    engine = FakeEngine()
    answer = respond(engine, {"top_logprobs": 2}).json()
    assert engine.requests[0].sampling.logprobs is None
    assert answer["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("required", ["apply_patch", "agents__spawn", "agents__apply_patch"]),
        ({"type": "function", "name": "spawn"}, ["agents__spawn"]),
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
    ],
)
def test_a_call_can_be_demanded_by_the_clients_name(choice: Any, called: list[str]) -> None:
    engine = saying("Hi")
    assert respond(engine, {"tools": TOOLS, "tool_choice": choice}).status_code == 200
    form = engine.requests[0].form
    assert form is not None and form.calls is not None
    assert [tool.name for tool in form.calls.tools] == called


def test_no_tool_of_that_name() -> None:
    refused = respond(saying("Hi"), {"tools": TOOLS, "tool_choice": {"type": "function", "name": "sell"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
