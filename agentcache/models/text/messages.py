"""Chat messages as chat templates want them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentcache.errors import InvalidRequest
from agentcache.models.text.json_values import parse_json

_MOST_APPENDED = 8


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their content as one string and tool call arguments as data, as mlx-lm gives them to templates.

    Raises:
        InvalidRequest: a message without a role, or content that is not text.
    """
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested dicts and lists in which every string, also every key, went through `change`.

    Keys that become equal stay apart: the later ones get U+FFFD appended, and from the tenth on a number.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return _with_keys(value, change)
    if isinstance(value, Sequence):
        return [with_strings(part, change) for part in value]
    return value


def _with_keys(value: Mapping[Any, Any], change: Callable[[str], str]) -> dict[Any, Any]:
    changed = dict[Any, Any]()
    copies = Counter[str]()  # by name: how many more have become it
    for key, part in value.items():
        base = name = change(key) if isinstance(key, str) else key
        while name in changed:
            copies[base] += 1
            name = _copy(base, copies[base])
        changed[name] = with_strings(part, change)
    return changed


def _copy(name: str, number: int) -> str:
    return f"{name}\ufffd{number}" if number > _MOST_APPENDED else name + "\ufffd" * number


def _plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("A message is an object with a `role`.", param=where)
    plain = {**message, "content": _plain_content(message.get("content"), f"{where}.content")}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_with_data_arguments(call) for call in message["tool_calls"]]
    return plain


def _plain_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("Content is a string or a list of text parts.", param=where)
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    raise InvalidRequest("Only content parts of type `text` are supported.", param=where)


def _with_data_arguments(call: Any) -> Any:
    """Templates write arguments as JSON or walk through them; clients send them as a JSON string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
