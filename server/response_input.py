"""`input` items and tools of `/v1/responses` for chat templates, and tool calls back."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentcache.server.answer_form import ToolChoice, read_tool_choice
from agentcache.server.context import Call
from agentcache.server.fields import note_tool_keys
from agentcache.server.messages import (
    ROLES,
    is_newest,
    read_arguments,
    read_parts,
    readable,
    tool_text,
    without_billing_header,
)
from agentcache.server.tools import ToolList, read_function
from agentcache.server.validate import Reader
from agentcache.text.json_values import parse_json

_BETWEEN_SYSTEM_TEXTS = "\n\n"
_CALL = "_call"
_NOT_SAID = ("type", "id", "call_id", "status", "encrypted_content", "execution")
_SEALED = "agentcache:"

INPUT = "input"
TOOL_TYPES = ("function", "custom", "namespace")
ADDITIONAL_TOOLS = ("additional_tools", "tool_search_output")
_FREE_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


def is_reference(item: Reader) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.get("role") is None and isinstance(item.get("id"), str))


def read_items(call: Call) -> list[dict[str, Any]]:
    """Read `instructions`, the continued conversation and `input` as messages.

    Items of a reply form one message, as do leading system texts: many templates allow only one.
    """
    messages = _Messages()
    messages.system(call.body.string("instructions") or "")
    for index, earlier in enumerate(call.continued.history()):
        _read_item(call.body.at(f"previous_response_id[{index}]", earlier), messages, call)
    given = call.body.get("input")
    if isinstance(given, str):
        messages.add("user", given)
    elif not isinstance(given, list) or not given:
        call.body.fail("input", "must be a string, or a list of at least one item")
    for item in call.body.objects("input") if isinstance(given, list) else ():
        _read_item(item, messages, call)
    messages.close()
    if not messages.list:
        call.body.fail("input", "must hold more than an empty system text")
    return messages.list


class _Messages:
    def __init__(self) -> None:
        self.list: list[dict[str, Any]] = []
        # Of the newest message.
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def add(self, role: str, content: str, **fields: Any) -> None:
        self.close()
        self.list.append({"role": role, "content": content} | fields)
        self._texts, self._thoughts = [content], []

    def close(self) -> None:
        if not self.list:
            return
        newest = self.list[-1]
        newest["content"] = (_BETWEEN_SYSTEM_TEXTS if newest["role"] == "system" else "").join(self._texts)
        if self._thoughts:
            newest["reasoning_content"] = "".join(self._thoughts)

    def system(self, text: str) -> None:
        text = without_billing_header(text)
        if not text:
            return
        if len(self.list) == 1 and self.list[0]["role"] == "system":
            self._texts.append(text)
        else:
            self.add("system", text)

    def call(self, item: Reader, arguments: Any, name: str | None = None) -> None:
        name = item.required_string("name") if name is None else name
        function = {"name": shown_name(item.string("namespace"), name), "arguments": arguments}
        said = {"id": item.required_string("call_id"), "type": "function", "function": function}
        self._open_reply().setdefault("tool_calls", []).append(said)

    def say(self, text: str) -> None:
        self._open_reply()
        self._texts.append(text)

    def think(self, thought: str) -> None:
        self._open_reply().setdefault("reasoning_content", "")
        self._thoughts.append(thought)

    def _open_reply(self) -> dict[str, Any]:
        if not self.list or self.list[-1]["role"] != "assistant":
            self.add("assistant", "")
        return self.list[-1]


def _read_item(item: Reader, messages: _Messages, call: Call) -> None:
    kind = "item_reference" if is_reference(item) else item.string("type")
    if kind is None and item.get("role") is not None:
        kind = "message"
    match kind:
        case "message":
            _read_message(item, messages, call)
        case "reasoning":
            if text := _read_thought(item, call):
                messages.think(text)
        case "function_call":
            messages.call(item, read_arguments(item))
        case "custom_tool_call":
            messages.call(item, {INPUT: item.required_string("input")})
        case "function_call_output" | "custom_tool_call_output":
            if "output" not in item.value:
                item.fail("output", "is required")
            output = tool_text(item, "output", "", call)
            messages.add("tool", output, tool_call_id=item.required_string("call_id"))
        case "item_reference":
            stored = call.continued.items[item.required_string("id")]
            _read_item(item.at("", stored), messages, call)
        case "additional_tools":
            pass  # see `read_response_tools`
        case None:
            item.fail("type", "is required")
        case _:
            _read_other(item, kind, messages, call)


def _read_other(item: Reader, kind: str, messages: _Messages, call: Call) -> None:
    said = {name: value for name, value in item.value.items() if name not in _NOT_SAID and value is not None}
    if item.get("call_id") is not None and kind.endswith(_CALL):
        messages.call(item, read_arguments(item) if "arguments" in said else said, kind.removesuffix(_CALL))
    elif item.get("call_id") is not None and kind.endswith("_output"):
        output = tool_text(item if "output" in said else item.at("", {"output": said}), "output", "", call)
        messages.add("tool", output, tool_call_id=item.required_string("call_id"))
    elif text := readable(said):
        call.notes.add(f"{item.path}: an item of type {kind!r:.80} was read as text")
        text = f"[{kind:.80}]\n{text}\n"
        messages.say(text) if kind.endswith(_CALL) else messages.add("user", text)
    else:
        call.notes.add(f"{item.path}: an item of type {kind!r:.80} was left out")


def _read_message(item: Reader, messages: _Messages, call: Call) -> None:
    given = item.required_string("role")
    role = ROLES.get(given)
    if role not in ("system", "user", "assistant"):
        item.fail("role", "must be one of system, developer, user, assistant")
    text = _read_content(item, role, call)
    if role == "system":
        messages.system(text)
    elif role == "assistant":
        messages.say(text)
    else:
        messages.add(role, text)


def _read_content(item: Reader, role: str, call: Call) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    if content is None and (role == "assistant" or not is_newest(item, call)):
        return ""
    if not isinstance(content, list):
        item.fail("content", "must be a string or a list of parts")
    return "".join(read_parts(item, "content", role, call))


def _read_thought(item: Reader, call: Call) -> str:
    for part in item.objects("content") if is_newest(item, call) else ():
        part.required_string("text")
    shown = readable(item.get("content")) or readable(item.get("summary"))
    return shown or _unsealed(item.string("encrypted_content") or "")


def sealed(thought: str) -> str:
    """Encode a thought for clients that return only `encrypted_content`."""
    return _SEALED + base64.b64encode(thought.encode()).decode()


def _unsealed(content: str) -> str:
    if not content.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""


@dataclass(frozen=True)
class ResponseTool:
    name: str
    namespace: str | None = None
    is_custom: bool = False
    is_strict: bool = False  # not shown

    @property
    def fields(self) -> dict[str, Any]:
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


@dataclass(frozen=True)
class ResponseTools:
    """Tools of a request, by shown name; `shown` go to the chat template, None if none may be called."""

    shown: list[dict[str, Any]] | None = None
    by_name: Mapping[str, ResponseTool] = field(default_factory=dict)
    choice: ToolChoice = ToolChoice()
    left_out: frozenset[str] = frozenset()

    @property
    def strict(self) -> frozenset[str]:
        return frozenset(name for name, tool in self.by_name.items() if tool.is_strict)

    def find(self, name: str) -> ResponseTool:
        return self.by_name.get(name) or ResponseTool(name)


def shown_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def custom_input(arguments: str) -> str:
    """Text of a custom tool's call; invalid arguments unchanged."""
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def read_response_tools(call: Call) -> ResponseTools:
    body, tools, by_name = call.body, ToolList(), dict[str, ResponseTool]()
    for tool in body.objects("tools"):
        _read_tool(tool, None, call, tools, by_name)
    given = body.get("input")
    for index, item in enumerate(given if isinstance(given, list) else ()):
        if type(item) is dict and item.get("type") in ADDITIONAL_TOOLS:
            for tool in body.item("input", index).objects("tools"):
                _read_tool(tool, None, call, tools, by_name)
    shown = {tool.name: name for name, tool in reversed(list(by_name.items()))} | {name: name for name in by_name}
    choice = read_tool_choice(body, lambda word: tools.find(shown.get(word, word)))
    return ResponseTools(tools.shown(choice), by_name, choice, frozenset(tools.left_out))


def _read_tool(
    tool: Reader, namespace: str | None, call: Call, tools: ToolList, by_name: dict[str, ResponseTool]
) -> None:
    is_bare = tool.get("name") is not None or tool.get("function") is not None
    kind = tool.string("type") or ("function" if is_bare else tool.required_string("type"))
    if kind == "namespace" and namespace is None:
        note_tool_keys(call, tool.value)
        for inner in tool.objects("tools"):
            _read_tool(inner, tool.name("name"), call, tools, by_name)
        return
    if kind not in ("function", "custom"):
        return tools.leave_out(tool, kind, call)
    note_tool_keys(call, tool.value)
    function = read_function(tool)
    is_strict = function.get("strict") is True
    known = ResponseTool(function["name"], namespace, is_custom=kind == "custom", is_strict=is_strict)
    name = shown_name(namespace, known.name)
    by_name[name] = known
    shown = {"name": name, "description": function["description"], "parameters": function["parameters"]}
    if known.is_custom:
        shown |= {"description": _read_description(tool), "parameters": _FREE_TEXT}
    tools.add({"type": "function", "function": shown})


def _read_description(tool: Reader) -> str:
    form = tool.object("format")
    grammar = (form.string("definition") or "") if form.string("type") == "grammar" else ""
    syntax = f"The input follows this {form.string('syntax') or 'lark'} grammar:\n{grammar}" if grammar else ""
    return "\n\n".join(filter(None, (tool.string("description"), syntax)))
