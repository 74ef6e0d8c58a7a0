"""Functions, custom tools and namespaces of `/v1/responses` as functions for chat templates, and back.

A custom tool becomes a function with one string. A namespaced tool gets a combined name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentcache.server.answer_form import ToolChoice, read_tool_choice
from agentcache.server.context import Call
from agentcache.server.fields import note_tool_keys
from agentcache.server.tools import ToolList, read_function
from agentcache.server.validate import Reader
from agentcache.text.json_values import parse_json

INPUT = "input"
TOOL_TYPES = ("function", "custom", "namespace")
ADDITIONAL_TOOLS = ("additional_tools", "tool_search_output")
_FREE_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


@dataclass(frozen=True)
class ResponseTool:
    """A tool in the client's terms."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    is_strict: bool = False  # not shown: prompts of sessions stay as they were

    @property
    def fields(self) -> dict[str, Any]:
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


@dataclass(frozen=True)
class ResponseTools:
    """Tools of a request.

    Args:
        shown: for the chat template; None if none may be called.
        by_name: client's tools by shown name.
        choice: with shown names.
        left_out: names and types of server tools.
    """

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
    """Return a custom tool's text, or invalid arguments unchanged."""
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def read_response_tools(call: Call) -> ResponseTools:
    """Read `tools`, and tools in input items, as Codex sends them."""
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
