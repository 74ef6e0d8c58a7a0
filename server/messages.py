"""Checks OpenAI chat messages and shapes them for chat templates."""

from __future__ import annotations

import re
from typing import Any

from agentcache.server.context import Call
from agentcache.server.parts import THOUGHTS, is_newest, read_parts, readable, tool_text
from agentcache.server.validate import Reader
from agentcache.text.json_values import parse_json, write_json
from agentcache.text.messages import REASONING_KEYS

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

_BILLING_HEADER = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE | re.MULTILINE)


def read_messages(call: Call) -> list[dict[str, Any]]:
    messages = [_read_message(message, call) for message in call.body.objects("messages")]
    if not messages:
        call.body.fail("messages", "must be a list of at least one message")
    return messages


def _read_message(message: Reader, call: Call) -> dict[str, Any]:
    given = message.required_string("role")
    if given not in ROLES:
        message.fail("role", f"must be one of {', '.join(ROLES)}")
    role = ROLES[given]
    message.string("name")
    message.string("tool_call_id")
    in_history = not is_newest(message, call)
    calls = [_read_call(said, in_history) for said in message.objects("tool_calls")] or _former_call(message, role)
    if calls and role != "assistant":
        message.fail("tool_calls", "belongs to assistant messages only")
    read = {name: value for name, value in message.value.items() if value is not None and name != "function_call"}
    if role == "assistant" and not any(map(read.get, REASONING_KEYS)) and (thought := _read_thoughts(message)):
        read["reasoning_content"] = thought
    content = _read_content(message, role, call)
    read |= {"role": role, "content": without_billing_header(content) if role == "system" else content}
    if given == "function" and "tool_call_id" not in read and message.string("name"):
        read["tool_call_id"] = _former_id(message)
    return read | ({"tool_calls": calls} if calls else {})


def _read_content(message: Reader, role: str, call: Call) -> str:
    """Return the content as text; assistants may omit it, tools may send any value."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if role == "tool":
        return tool_text(message, "content", "", call)
    if content is None and (role == "assistant" or "content" in message.value or not is_newest(message, call)):
        return ""
    if isinstance(content, list):
        return "".join(read_parts(message, "content", role, call, without=THOUGHTS if role == "assistant" else ()))
    message.fail("content", "must be a string or a list of text parts")


def _read_thoughts(message: Reader) -> str:
    if not isinstance(message.get("content"), list):
        return ""
    parts = (part for part in message.items("content") if type(part) is dict and part.get("type") in THOUGHTS)
    return "\n".join(filter(None, map(readable, parts)))


def _former_call(message: Reader, role: str) -> list[dict[str, Any]]:
    """Read OpenAI's deprecated `function_call`; its result has role `function`."""
    if role != "assistant" or not isinstance(message.get("function_call"), dict):
        return []
    function = message.object("function_call")
    said = {"name": function.required_string("name"), "arguments": read_arguments(function)}
    return [{"id": _former_id(function), "type": "function", "function": said}]


def _former_id(named: Reader) -> str:
    """Return an id for calls and results that have only a name."""
    return f"call_{named.string('name')}"


def without_billing_header(text: str) -> str:
    """Remove a line that coding agents change in every request: it would prevent reuse."""
    return _BILLING_HEADER.sub("", text)


def _read_call(call: Reader, in_history: bool) -> dict[str, Any]:
    """Read a call in any shape. History may lack its name: a refusal would end the conversation."""
    if isinstance(call.get("custom"), dict):
        custom = call.object("custom")
        said = {"name": custom.required_string("name"), "arguments": {"input": custom.string("input") or ""}}
        return {"id": call.string("id"), "type": "function", "function": said}
    if call.get("function") is None and call.get("name") is not None:  # frameworks' shape
        arguments = read_arguments(call, "args" if call.get("arguments") is None else "arguments")
        said = {"name": call.required_string("name"), "arguments": arguments}
        return {"id": call.string("id"), "type": "function", "function": said}
    function = call.object("function")
    name = (function.string("name") or "") if in_history else function.required_string("name")
    return call.value | {"function": function.value | {"name": name, "arguments": read_arguments(function)}}


def read_arguments(function: Reader, name: str = "arguments") -> Any:
    """Return arguments as an object for templates; else JSON text: a refusal would end the conversation."""
    arguments = function.get(name)
    if isinstance(arguments, dict):
        return arguments
    if arguments is not None and not isinstance(arguments, str):
        return write_json(arguments)
    text = function.string(name) or "{}"
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
