"""Chat messages of the OpenAI dialect, checked and brought into the shape that chat templates expect."""

from __future__ import annotations

import re
from typing import Any

from agentcache.models.text.json_values import parse_json
from agentcache.server.context import Call
from agentcache.server.parts import read_parts
from agentcache.server.validate import Reader

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
    calls = [_read_call(call) for call in message.objects("tool_calls")]
    if calls and role != "assistant":
        message.fail("tool_calls", "belongs to assistant messages only")
    read = {name: value for name, value in message.value.items() if value is not None}
    content = _read_content(message, role, call)
    read |= {"role": role, "content": without_billing_header(content) if role == "system" else content}
    return read | ({"tool_calls": calls} if calls else {})


def _read_content(message: Reader, role: str, call: Call) -> str:
    """The content as one text. An assistant may have said nothing."""
    content = message.get("content")
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(read_parts(message, "content", role, call))
    message.fail("content", "must be a string or a list of text parts")


def without_billing_header(text: str) -> str:
    """A system text without the line that some coding agents change in every request, which would match nothing."""
    return _BILLING_HEADER.sub("", text)


def _read_call(call: Reader) -> dict[str, Any]:
    function = call.object("function")
    function.required_string("name")
    return call.value | {"function": function.value | {"arguments": read_arguments(function)}}


def read_arguments(function: Reader) -> Any:
    """Arguments as an object where they are one: templates want it so, while the wire has a string of JSON."""
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return arguments
    text = function.string("arguments") or "{}"
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
