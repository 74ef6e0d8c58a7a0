"""Asks the responses route, and reads its streams as OpenAI's own types do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import httpx
from openai.types.responses import ResponseStreamEvent

from agentcache.api.model import ReplyFormat
from agentcache.api.request import ChatPrompt
from tests.server.driver import post
from tests.server.fake_engine import MODEL, FakeEngine

# OpenAI's own types of events, by name.
EVENTS: dict[str, Any] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
LOOK_SHOWN = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
CALLER = replace(MODEL, reply_format=ReplyFormat("json_tools", (("<think>", "</think>"),)))


def respond(engine: FakeEngine, fields: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
    return post(engine, "/v1/responses", {"input": "hi"} | (fields or {}), **options)


def stream(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events, each of which has the name of its type, its number, and all that OpenAI's own types want."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENTS[events[-1]["type"]].model_validate(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def messages_of(engine: FakeEngine) -> list[dict[str, Any]]:
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages
