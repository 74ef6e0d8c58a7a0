"""Translates tool definitions to functions for chat templates.

Anthropic's client tools get schemas. Server tools, which agents send unasked, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentcache.server.answer_form import ToolChoice
from agentcache.server.context import Call
from agentcache.server.fields import note_tool_keys
from agentcache.server.validate import Reader

_VERSION = re.compile(r"(?:_preview)?(?:_20[0-9]{2}_?[0-9]{2}_?[0-9]{2})?\Z")
_WHOLE = {"type": "integer"}
_PLACE = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}

_ACTIONS = ("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click")
_ACTIONS_2025 = ("left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait")

_SCHEMAS = ("parameters", "input_schema", "inputSchema")


def client_tool(tool: Reader) -> dict[str, Any] | None:
    """Function of a known type, with any date."""
    kind = tool.string("type") or ""
    found = _maker(kind)
    strict = {"strict": True} if tool.get("strict") is True else {}
    return None if found is None else found(tool, kind) | strict


def family(kind: str) -> str:
    """A tool's type without date and preview; one word for all spellings of a client tool."""
    bare = _VERSION.sub("", kind)
    found = _maker(bare)
    return bare if found is None else next(front for front, make in _TOOLS.items() if make is found)


def _maker(kind: str) -> Callable[[Reader, str], dict[str, Any]] | None:
    return next((make for front, make in _TOOLS.items() if kind == front or kind.startswith(front + "_2")), None)


def _function(tool: Reader, name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    given = tool.name("name") if tool.get("name") is not None else name
    return {"name": given, "description": description, "parameters": schema}


def _object(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _said(text: str, kind: str | None = "string", **more: Any) -> dict[str, Any]:
    return ({"type": kind} if kind else {}) | {"description": text} | more


def _bash(tool: Reader, kind: str) -> dict[str, Any]:
    schema = _object(
        {
            "command": _said("The command to run. Required unless the shell is restarted."),
            "restart": _said("True to restart the shell.", "boolean"),
        }
    )
    return _function(tool, "bash", "Run commands in a bash session that persists between calls.", schema)


def _text_editor(tool: Reader, kind: str) -> dict[str, Any]:
    is_older = kind.rpartition("_")[2] < "20250429"
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if is_older else [])]
    limit = tool.integer("max_characters", minimum=1)
    views = f"View shows a file with line numbers{f', at most {limit} characters,' if limit else ''} or lists a folder."
    properties = {
        "command": _said("What to do.", enum=commands),
        "path": _said("Absolute path of the file or folder."),
        "file_text": _said("For create: the content of the new file."),
        "old_str": _said("For str_replace: the text to replace, which must occur exactly once."),
        "new_str": _said("For str_replace: the new text. For older versions of insert: the text to insert."),
        "insert_line": _said("For insert: the line after which to insert; 0 for the beginning.", "integer"),
        "insert_text": _said("For insert: the text to insert."),
        "view_range": _said("For view: first and last line, from 1; -1 for the end.", "array", items=_WHOLE),
    }
    name = "str_replace_editor" if is_older else "str_replace_based_edit_tool"
    return _function(tool, name, f"View, create and edit files. {views}", _object(properties, "command", "path"))


def _memory(tool: Reader, kind: str) -> dict[str, Any]:
    properties = {
        "command": _said("What to do.", enum=["view", "create", "str_replace", "insert", "delete", "rename"]),
        "path": _said("Path of the file or folder, below /memories."),
        "view_range": _said("For view: first and last line.", "array", items=_WHOLE),
        "file_text": _said("For create: the content of the file."),
        "old_str": _said("For str_replace: the text to replace."),
        "new_str": _said("For str_replace: the new text."),
        "insert_line": _said("For insert: the line after which to insert.", "integer"),
        "insert_text": _said("For insert: the text to insert."),
        "old_path": _said("For rename: the path as it is."),
        "new_path": _said("For rename: the new path."),
    }
    description = "Keep notes between conversations, as files in the folder /memories. Look into it before a task."
    return _function(tool, "memory", description, _object(properties, "command"))


def _computer(tool: Reader, kind: str) -> dict[str, Any]:
    version = kind.rpartition("_")[2]
    newer = _ACTIONS_2025 if version >= "20250124" else ()
    zoom = ("zoom",) if version >= "20251124" else ()
    properties: dict[str, Any] = {
        "action": _said("What to do.", enum=[*_ACTIONS, "screenshot", "cursor_position", *newer, *zoom]),
        "coordinate": _PLACE | _said("x and y in pixels from the upper left corner.", None),
        "text": _said("The text to type, or the key to press, as in ctrl+s."),
    }
    if newer:
        properties |= {
            "start_coordinate": _PLACE | _said("Where to begin dragging.", None),
            "scroll_direction": _said("Where to scroll.", enum=["up", "down", "left", "right"]),
            "scroll_amount": _said("How many clicks of the wheel.", "integer"),
            "duration": _said("Seconds to wait or to hold a key.", "number"),
        }
    if zoom:
        properties["region"] = _said("For zoom: x and y of two corners.", "array", items=_WHOLE)
    size = [tool.integer(name, minimum=1) for name in ("display_width_px", "display_height_px")]
    screen = f" The screen has {size[0]} by {size[1]} pixels." if None not in size else ""
    description = f"Use the mouse, the keyboard and screenshots of a computer.{screen}"
    return _function(tool, "computer", description, _object(properties, "action"))


_TOOLS = {
    "bash": _bash,
    "text_editor": _text_editor,
    "str_replace_based_edit_tool": _text_editor,
    "str_replace_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}


@dataclass
class ToolList:
    """Tools of a request, by name in OpenAI's shape.

    `left_out`: names and types; `by_family`: names of functions, types left out.
    """

    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    by_family: dict[str, str] = field(default_factory=dict)

    def shown(self, choice: ToolChoice) -> list[dict[str, Any]] | None:
        """Tools for the chat template. A demanded call shows all, so that the prompt keeps its prefix."""
        if not choice.may_call:
            return None
        tools = list(self.functions.values())
        if choice.names is not None and not choice.must_call:
            tools = [tool for tool in tools if tool["function"]["name"] in choice.names]
        return tools or None

    def find(self, word: str) -> str | None:
        """Name of the tool that a name or type means; its type if left out."""
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
    holder = tool.object("function") if tool.get("function") is not None else tool
    schema = next((name for name in _SCHEMAS if holder.get(name) is not None), _SCHEMAS[0])
    function = {
        "name": holder.name("name"),
        "description": holder.string("description") or "",
        "parameters": {} if holder.get(schema) == [] else holder.object(schema).value,  # PHP's empty object
    }
    return function | ({"strict": True} if tool.get("strict") is True or holder.get("strict") is True else {})


def _with_strict(tool: Reader) -> dict[str, Any]:
    function = tool.object("function").value
    if tool.get("strict") is not True or function.get("strict") is not None:
        return tool.value
    return tool.value | {"function": function | {"strict": True}}


def _added_tools(body: Reader) -> Iterator[Reader]:
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
