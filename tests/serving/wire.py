"""One answer in each dialect of the wire, streamed and not, as what it says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.reply_formats import TOOLS


class Asks(Protocol):
    """Sends requests: the app in this process, or a server."""

    def post(self, path: str, body: dict[str, Any]) -> Any: ...

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Said:
    """What an answer says, whatever its dialect.

    Args:
        calls: name and arguments of each.
        stop: the stop string that ended it, which only messages name; None for none.
        is_cut: whether the limit of tokens has ended it.
    """

    thought: str
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    stop: str | None = None
    is_cut: bool = False


def say_in(
    server: Asks,
    dialect: str,
    content: Any = "Hi",
    *,
    streams: bool,
    tools: Sequence[dict[str, Any]] = TOOLS,
    **fields: Any,
) -> Said:
    """The answer to one user message; `dialect` is chat, messages or responses."""
    message = {"role": "user", "content": content}
    body: dict[str, Any]
    if dialect == "chat":
        body = {"messages": [message], "tools": list(tools), **fields}
        path = "/v1/chat/completions"
        return _chat_stream(server.events(path, body)) if streams else _chat(server.post(path, body).json())
    if dialect == "messages":
        shown = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in tools]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body = {"messages": [message], "max_tokens": 2000, "thinking": thinking, "tools": shown, **fields}
        path = "/v1/messages"
        return _message(_message_stream(server.events(path, body)) if streams else server.post(path, body).json())
    body = {"input": [message], "tools": [tool["function"] | {"type": "function"} for tool in tools], **fields}
    path = "/v1/responses"
    if not streams:
        return _response(server.post(path, body).json())
    events = server.events(path, body)
    said = _response(events[-1]["response"])
    for kind, text in (("output_text", said.text), ("reasoning_text", said.thought)):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == text
    return said


def _chat(answer: dict[str, Any]) -> Said:
    [choice] = answer["choices"]
    message = choice["message"]
    calls = tuple(
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])
    )
    is_cut = choice["finish_reason"] == "length"
    assert is_cut or choice["finish_reason"] == ("tool_calls" if calls else "stop")
    return Said(message.get("reasoning_content", ""), message["content"] or "", calls, None, is_cut)


def _chat_stream(chunks: Sequence[dict[str, Any]]) -> Said:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls: dict[int, dict[str, Any]] = {}
    for call in [call for delta in deltas for call in delta.get("tool_calls", [])]:
        known = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
        known["function"] = {key: old + call["function"].get(key, "") for key, old in known["function"].items()}
    message = {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning_content": "".join(delta.get("reasoning_content") or "" for delta in deltas),
        "tool_calls": list(calls.values()),
    }
    return _chat({"choices": [{"message": message, "finish_reason": choices[-1]["finish_reason"]}]})


def _message(answer: dict[str, Any]) -> Said:
    blocks = answer["content"]
    calls = tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
    reasons = {"max_tokens", "stop_sequence" if answer["stop_sequence"] else "tool_use" if calls else "end_turn"}
    assert answer["stop_reason"] in reasons
    return Said(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        calls,
        answer["stop_sequence"],
        answer["stop_reason"] == "max_tokens",
    )


def _message_stream(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    ending: dict[str, Any] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for kind in ("text", "thinking"):
                if kind in delta:
                    block[kind] += delta[kind]
            block["json"] += delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            ending = event["delta"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return {"content": blocks, **ending}


def _response(response: dict[str, Any]) -> Said:
    items = response["output"]
    thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    calls = tuple((item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call")
    return Said("".join(thoughts), "".join(texts), calls, None, response["status"] == "incomplete")
