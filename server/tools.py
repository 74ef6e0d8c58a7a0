"""Translates tool definitions to functions for chat templates.

Server tools are left out with a note: agents send them by default, and a refusal would end the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentcache.server.answer_form import ToolChoice, read_tool_choice
from agentcache.server.client_tools import client_tool, family
from agentcache.server.context import Call
from agentcache.server.fields import note_tool_keys
from agentcache.server.validate import Reader

_SCHEMAS = ("parameters", "input_schema", "inputSchema")


@dataclass
class ToolList:
    """Tools of a request.

    Attributes:
        functions: by name, in OpenAI's shape.
        left_out: names and types of tools that are not shown.
        by_family: names of functions, and types of tools that are left out, by the family of their type.
    """

    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    by_family: dict[str, str] = field(default_factory=dict)

    def shown(self, choice: ToolChoice) -> list[dict[str, Any]] | None:
        return choice.shown(list(self.functions.values()))

    def choice(self, body: Reader) -> ToolChoice:
        return read_tool_choice(body, self.find)

    def find(self, word: str) -> str | None:
        """Return the tool that a name or a type means: its name, or its type if it is left out."""
        is_known = word in self.functions or word in self.left_out
        return word if is_known else self.by_family.get(family(word))

    def add(self, tool: dict[str, Any]) -> None:
        self.functions[tool["function"]["name"]] = tool

    def leave_out(self, tool: Reader, kind: str, call: Call) -> None:
        self.left_out |= {kind, *([tool.value["name"]] if isinstance(tool.get("name"), str) else [])}
        self.by_family.setdefault(family(kind), kind)
        call.notes.add(f"{tool.path}: a tool of type {kind!r:.80} was left out")


def read_chat_tools(call: Call) -> ToolList:
    tools = ToolList()
    for tool in call.body.objects("tools"):
        kind = tool.string("type")
        if kind == "custom" and isinstance(tool.get("custom"), dict):
            tool.fail("type", 'must be "function": custom tools are served in /v1/responses')
        if kind == "function" and (tool.get("function") is not None or tool.get("name") is None):
            tool.object("function").name("name")
            note_tool_keys(call, tool.value, is_shown=True)
            tools.add(_with_strict(tool))
        else:
            _add_tool(tool, kind, tools, call)
    return tools


def read_anthropic_tools(call: Call) -> ToolList:
    """Read `tools`, and tools added by system messages."""
    tools = ToolList()
    for tool in call.body.objects("tools"):
        _add_tool(tool, tool.string("type"), tools, call)
    for tool in _added_tools(call.body):
        _add_tool(tool, tool.string("type"), tools, call)
    return tools


def _add_tool(tool: Reader, kind: str | None, tools: ToolList, call: Call) -> None:
    if (function := client_tool(tool)) is None:
        if kind not in (None, "function", "custom") and all(tool.get(name) is None for name in _SCHEMAS):
            return tools.leave_out(tool, kind or "", call)
        function = read_function(tool)
    else:
        tools.by_family.setdefault(family(kind or ""), function["name"])
    note_tool_keys(call, tool.value)
    tools.add({"type": "function", "function": function})


def read_function(tool: Reader) -> dict[str, Any]:
    """Read a definition: in `function`, or beside the type."""
    holder = tool.object("function") if tool.get("function") is not None else tool
    schema = next((name for name in _SCHEMAS if holder.get(name) is not None), _SCHEMAS[0])
    function = {
        "name": holder.name("name"),
        "description": holder.string("description") or "",
        "parameters": {} if holder.get(schema) == [] else holder.object(schema).value,  # PHP's empty object
    }
    return function | ({"strict": True} if tool.get("strict") is True or holder.get("strict") is True else {})


def _with_strict(tool: Reader) -> dict[str, Any]:
    """Move a `strict` beside the tool's function into it."""
    function = tool.object("function").value
    if tool.get("strict") is not True or function.get("strict") is not None:
        return tool.value
    return tool.value | {"function": function | {"strict": True}}


def _added_tools(body: Reader) -> Iterator[Reader]:
    """Yield definitions in `tool_addition` blocks; references to `tools` are skipped."""
    for index, message in enumerate(body.items("messages")):
        if type(message) is not dict or message.get("role") != "system" or type(message.get("content")) is not list:
            continue
        for block in body.item("messages", index).objects("content"):
            if block.get("type") == "tool_addition":
                tool = block.object("tool")
                if isinstance(tool.get("definition"), dict):
                    yield tool.object("definition")
                elif tool.get("type") != "tool_reference" and tool.get("name") is not None:
                    yield tool
                yield from block.objects("tools")
