"""Normalises chat messages and call ids for chat templates."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from agentcache.errors import InvalidRequest
from agentcache.text.json_values import parse_json, write_json

# The most common first.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
THOUGHT = REASONING_KEYS[0]
_MOST_APPENDED = 8
_MEDIA = ("image", "input_image", "audio", "input_audio", "video", "file", "input_file", "document")


Note = Callable[[str], None]
_LENGTH = 9
_CHARACTERS = string.ascii_letters + string.digits
_SHORT = re.compile(rf"[A-Za-z0-9]{{{_LENGTH}}}")


def _ignore(note: str) -> None:
    return None


def plain_messages(messages: Sequence[Mapping[str, Any]], note: Note = _ignore) -> list[dict[str, Any]]:
    """Return messages with content and thought as strings, call arguments as objects. `note` gets changes.

    Raises InvalidRequest for other forms and media.
    """
    return [_plain_message(message, f"messages[{index}]", note) for index, message in enumerate(messages)]


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Copy nested data, its strings and keys changed. Equal keys get distinct suffixes."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return _with_keys(value, change)
    if isinstance(value, Sequence):
        return [with_strings(part, change) for part in value]
    return value


def _with_keys(value: Mapping[Any, Any], change: Callable[[str], str]) -> dict[Any, Any]:
    changed = dict[Any, Any]()
    copies = Counter[str]()
    for key, part in value.items():
        base = name = change(key) if isinstance(key, str) else key
        while name in changed:
            copies[base] += 1
            name = _copy(base, copies[base])
        changed[name] = with_strings(part, change)
    return changed


def _copy(name: str, number: int) -> str:
    return f"{name}\ufffd{number}" if number > _MOST_APPENDED else name + "\ufffd" * number


def _plain_message(message: Mapping[str, Any], where: str, note: Note) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("A message is an object with a `role`.", param=where)
    plain = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    plain["content"] = _plain_content(message.get("content"), f"{where}.content", note)
    thoughts = [_thought_text(message[key], note) for key in REASONING_KEYS if message.get(key) is not None]
    if thoughts:
        plain[THOUGHT] = next(filter(None, thoughts), "")
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = _plain_calls(calls, f"{where}.tool_calls", note)
    if "tool_call_id" in message:
        plain["tool_call_id"] = _plain_id(message["tool_call_id"])
    return plain


def _thought_text(thought: Any, note: Note) -> str:
    if isinstance(thought, str):
        return thought
    parts = thought if isinstance(thought, list) else [thought]
    try:
        return "".join(_part_text(part, "", note) for part in parts)
    except InvalidRequest:
        return _as_json(thought)


def _plain_content(content: Any, where: str, note: Note) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("Content is a string or a list of parts.", param=where)
    return "".join(_part_text(part, f"{where}[{index}]", note) for index, part in enumerate(content))


def _part_text(part: Any, where: str, note: Note) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind.startswith(_MEDIA):
        raise InvalidRequest("Only text is supported, no pictures, sounds or files.", param=where)
    text = next((part[key] for key in ("text", "thinking") if isinstance(part.get(key), str)), None)
    if kind != "text" or text is None:
        note(f"messages: a part of type {kind!r:.80} is sent as text")
    return _as_json(part) if text is None else str(text)


def _as_json(value: Any) -> str:
    try:
        return write_json(value, ensure_ascii=False)
    except ValueError:
        return str(value)


def _plain_calls(calls: Any, where: str, note: Note) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequest("The tool calls of a message are a list.", param=where)
    return [_plain_call(call, f"{where}[{index}]", note) for index, call in enumerate(calls)]


def _plain_call(call: Any, where: str, note: Note) -> dict[str, Any]:
    # Templates need an object.
    function = call.get("function") if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping | None) or call is None:
        raise InvalidRequest("A tool call is an object with a `function`.", param=where)
    plain = {**call, "id": _plain_id(call["id"])} if "id" in call else dict(call)
    if function is not None:
        plain["function"] = {**function, "arguments": _object(function.get("arguments"), note)}
    return plain


def _plain_id(call_id: Any) -> str | None:
    # Some clients send numbers.
    return call_id if call_id is None or isinstance(call_id, str) else _as_json(call_id)


def _object(arguments: Any, note: Note) -> dict[str, Any]:
    value = arguments
    if isinstance(arguments, str):
        try:
            value = parse_json(arguments) if arguments.strip() else None
        except ValueError:
            value = arguments
    if isinstance(value, Mapping):
        return dict(value)
    note("messages: arguments of a call that are not an object are wrapped in one")
    return {} if value is None else {"arguments": value}


def new_call_id() -> str:
    return "".join(secrets.choice(_CHARACTERS) for _ in range(_LENGTH))


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make call ids nine letters and digits, as Mistral requires; later messages never change earlier ids."""
    short_of = _ShortIds()
    return [_with_ids(message, short_of) for message in messages]


class _ShortIds:
    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, call_id: Any) -> Any:
        if not isinstance(call_id, str):
            return call_id
        if call_id not in self._known:
            candidates = (_digest(call_id, attempt) for attempt in count())
            is_short = _SHORT.fullmatch(call_id) and call_id not in self._taken
            short = call_id if is_short else next(each for each in candidates if each not in self._taken)
            self._taken.add(short)
            self._known[call_id] = short
        return self._known[call_id]


def _digest(call_id: str, attempt: int) -> str:
    content = f"{attempt} {call_id}".encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "big")
    digits = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, len(_CHARACTERS))
        digits.append(_CHARACTERS[digit])
    return "".join(digits)


def _with_ids(message: Mapping[str, Any], short_of: _ShortIds) -> dict[str, Any]:
    changed = dict(message)
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        changed["tool_calls"] = [
            {**call, "id": short_of(call["id"])} if isinstance(call, Mapping) and "id" in call else call
            for call in calls
        ]
    if "tool_call_id" in message:
        changed["tool_call_id"] = short_of(message["tool_call_id"])
    return changed
