"""Clients of three HTTP dialects. Each holds a conversation and echoes the server's answers, as agents do.

Messages of the user, the tools and the server are in chat's form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

Message = dict[str, Any]


class Client(Protocol):
    """One conversation on the wire."""

    def hear(self, message: Message) -> None:
        """Take the system's, the user's or a tool's words into the conversation."""

    def ask(self, http: httpx.Client, tools: list[Message], *, streams: bool, **fields: Any) -> tuple[Message, Message]:
        """Send the conversation; the reply, which is part of it from now on, and the server's report."""


def _post(http: httpx.Client, path: str, body: Message) -> httpx.Response:
    response = http.post(path, json=body | {"temperature": 0, "agentcache": {"report": True}})
    assert response.status_code == 200, response.text
    return response


def _events(response: httpx.Response) -> list[Message]:
    lines = response.text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@dataclass
class ChatClient:
    """`/v1/chat/completions`.

    Args:
        drops: whether it sends no thoughts back.
    """

    drops: bool = False
    _messages: list[Message] = field(default_factory=list)

    def hear(self, message: Message) -> None:
        self._messages.append(message)

    def ask(self, http: httpx.Client, tools: list[Message], *, streams: bool, **fields: Any) -> tuple[Message, Message]:
        body = {"messages": self._messages, "tools": tools, "stream": streams} | fields
        response = _post(http, "/v1/chat/completions", body)
        if streams:
            chunks = _events(response)
            message = _message([choice["delta"] for chunk in chunks for choice in chunk["choices"]])
            report = chunks[-1]["agentcache"]
        else:
            message, report = response.json()["choices"][0]["message"], response.json()["agentcache"]
        if self.drops:
            message.pop("reasoning_content", None)
        self._messages.append(message)
        return message, report


def _message(deltas: list[Message]) -> Message:
    """A message as clients make it of a stream."""
    calls: dict[int, Message] = {}
    for call in [call for delta in deltas for call in delta.get("tool_calls") or ()]:
        known = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
        known |= {key: call[key] for key in ("id", "type") if key in call}
        for key, text in call["function"].items():
            known["function"][key] += text
    message: Message = {"role": "assistant", "content": "".join(each.get("content") or "" for each in deltas)}
    if thought := "".join(each.get("reasoning_content") or "" for each in deltas):
        message["reasoning_content"] = thought
    return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {})


@dataclass
class MessagesClient:
    """`/v1/messages`, as Claude Code speaks it.

    Args:
        thinks: whether it asks for thoughts and sends them back.
    """

    thinks: bool = False
    _system: list[Message] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)

    def hear(self, message: Message) -> None:
        if message["role"] == "system":
            self._system.append({"type": "text", "text": message["content"]})
        elif message["role"] == "tool":
            self._add_result(message)
        else:
            self._messages.append({"role": "user", "content": [{"type": "text", "text": message["content"]}]})

    def _add_result(self, message: Message) -> None:
        """Results of one reply's calls are blocks of one message."""
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        if self._messages[-1]["role"] == "assistant":
            self._messages.append({"role": "user", "content": []})
        self._messages[-1]["content"].append(block)

    def ask(self, http: httpx.Client, tools: list[Message], *, streams: bool, **fields: Any) -> tuple[Message, Message]:
        functions = [tool["function"] for tool in tools]
        told = [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
            for each in functions
        ]
        body = {"system": self._system, "messages": self._messages, "tools": told, "max_tokens": 4096}
        thinking = {"thinking": {"type": "adaptive"}} if self.thinks else {}
        response = _post(http, "/v1/messages", body | thinking | {"stream": streams} | fields)
        if streams:
            events = _events(response)
            blocks = _blocks(events)
            report = next(event["agentcache"] for event in events if "agentcache" in event)
        else:
            blocks, report = response.json()["content"], response.json()["agentcache"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _as_javascript(block["input"])
        self._messages.append({"role": "assistant", "content": blocks})
        return _in_chats_form(_parts_of_blocks(blocks)), report


def _as_javascript(value: Any) -> Any:
    """The value as JavaScript writes it again: 2.0 is 2."""

    def number(text: str) -> int | float:
        return int(float(text)) if float(text).is_integer() else float(text)

    return json.loads(json.dumps(value), parse_float=number)


def _blocks(events: list[Message]) -> list[Message]:
    """Content blocks as clients make them of a stream."""
    blocks: list[Message] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            arguments = ""
        elif event["type"] == "content_block_delta":
            block, delta = blocks[-1], event["delta"]
            arguments += delta.get("partial_json", "")
            for key in ("text", "thinking", "signature"):
                if key in delta:
                    block[key] += delta[key]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments or "{}")
    return blocks


def _parts_of_blocks(blocks: list[Message]) -> Iterator[tuple[str, Any]]:
    for block in blocks:
        if block["type"] == "thinking":
            yield "thought", block["thinking"]
        elif block["type"] == "text":
            yield "text", block["text"]
        else:
            yield "call", _call(block["id"], block["name"], json.dumps(block["input"]))


@dataclass
class ResponsesClient:
    """`/v1/responses`.

    Args:
        stores: whether it names the previous response and sends only new items; else it sends all items, as Codex does,
            with thoughts in `encrypted_content`.
    """

    stores: bool = False
    _items: list[Message] = field(default_factory=list)
    _instructions: str = ""
    _previous: str | None = None

    def hear(self, message: Message) -> None:
        if message["role"] == "system":
            self._instructions = message["content"]
        elif message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            self._items.append({"type": "function_call_output"} | output)
        else:
            content = [{"type": "input_text", "text": message["content"]}]
            self._items.append({"type": "message", "role": "user", "content": content})

    def ask(self, http: httpx.Client, tools: list[Message], *, streams: bool, **fields: Any) -> tuple[Message, Message]:
        told = [{"type": "function"} | tool["function"] | {"strict": False} for tool in tools]
        body = {"instructions": self._instructions, "input": self._items, "tools": told, "store": self.stores}
        more = {"previous_response_id": self._previous} if self.stores else {"include": ["reasoning.encrypted_content"]}
        response = _post(http, "/v1/responses", body | more | {"stream": streams} | fields)
        answer = _events(response)[-1]["response"] if streams else response.json()
        assert answer["status"] == "completed" and answer["store"] is self.stores, answer
        self._previous = answer["id"]
        self._items = [] if self.stores else [*self._items, *map(_echoed, answer["output"])]
        return _in_chats_form(_parts_of_items(answer["output"])), answer["agentcache"]


def _echoed(item: Message) -> Message:
    without = ("id", "status", *(("content",) if item["type"] == "reasoning" else ()))
    return {name: value for name, value in item.items() if name not in without}


def _parts_of_items(items: list[Message]) -> Iterator[tuple[str, Any]]:
    for item in items:
        if item["type"] == "function_call":
            yield "call", _call(item["call_id"], item["name"], item["arguments"])
        else:
            for part in item["content"]:
                yield "thought" if item["type"] == "reasoning" else "text", part["text"]


def _call(call_id: str, name: str, arguments: str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _in_chats_form(parts: Iterator[tuple[str, Any]]) -> Message:
    found: dict[str, list[Any]] = {"text": [], "thought": [], "call": []}
    for kind, part in parts:
        found[kind].append(part)
    message: Message = {"role": "assistant", "content": "".join(found["text"])}
    if found["thought"]:
        message["reasoning_content"] = "".join(found["thought"])
    return message | ({"tool_calls": found["call"]} if found["call"] else {})
