"""The tools of `/v1/responses`: functions, custom tools, and namespaces of both, as functions that a template shows.

A custom tool takes free text: the model sees a function with one string. A tool of a namespace is shown under both
names. What the model calls is told in the client's own terms again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentcache.models.text.json_values import parse_json
from agentcache.server.answer_form import ToolChoice, read_tool_choice
from agentcache.server.context import Call
from agentcache.server.validate import Reader

INPUT = "input"  # the one parameter of a custom tool
TOOL_TYPES = ("function", "custom", "namespace")
_FREE_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


@dataclass(frozen=True)
class ResponseTool:
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """What an item says of which tool is called."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


@dataclass(frozen=True)
class ResponseTools:
    """A request's tools.

    Args:
        shown: in the shape that chat templates expect; None for none, and where the model is not to call any.
        by_name: what each is to the client, by the name that is shown.
    """

    shown: list[dict[str, Any]] | None = None
    by_name: Mapping[str, ResponseTool] = field(default_factory=dict)

    def find(self, name: str) -> ResponseTool:
        return self.by_name.get(name) or ResponseTool(name)

    def choice(self, asked: ToolChoice) -> ToolChoice:
        """With the name that is shown in place of the client's."""
        names = [shown for shown, tool in self.by_name.items() if tool.name == asked.name]
        return replace(asked, name=names[0]) if names and asked.name not in self.by_name else asked


def shown_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def custom_input(arguments: str) -> str:
    """The free text in the arguments of a call; what is none is handed over as it is."""
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def read_response_tools(call: Call) -> ResponseTools:
    """Tools that a server would run, and others that are not known, are left out: agents have them on by default."""
    body = call.body
    shown: list[dict[str, Any]] = []
    by_name: dict[str, ResponseTool] = {}
    for tool in body.objects("tools"):
        _read_tool(tool, None, call, shown, by_name)
    return ResponseTools(shown if shown and read_tool_choice(body).may_call else None, by_name)


def _read_tool(
    tool: Reader, namespace: str | None, call: Call, shown: list[dict[str, Any]], by_name: dict[str, ResponseTool]
) -> None:
    kind = tool.required_string("type")
    if kind == "namespace" and namespace is None:
        for inner in tool.objects("tools"):
            _read_tool(inner, tool.name("name"), call, shown, by_name)
        return
    if kind not in ("function", "custom"):
        call.notes.add(f"{tool.path}: a tool of type {kind!r:.80} was left out")
        return
    known = ResponseTool(tool.name("name"), namespace, is_custom=kind == "custom")
    name = shown_name(namespace, known.name)
    by_name[name] = known
    parameters = _FREE_TEXT if known.is_custom else tool.object("parameters").value
    function = {"name": name, "description": _read_description(tool), "parameters": parameters}
    shown.append({"type": "function", "function": function})


def _read_description(tool: Reader) -> str:
    """With the grammar that a custom tool's text is to follow, if it says one."""
    form = tool.object("format")
    grammar = (form.string("definition") or "") if form.string("type") == "grammar" else ""
    syntax = f"The input follows this {form.string('syntax') or 'lark'} grammar:\n{grammar}" if grammar else ""
    return "\n\n".join(filter(None, (tool.string("description"), syntax)))
