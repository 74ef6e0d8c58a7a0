"""What form an answer must have, as the dialects say it: the format of its text, and which tools it must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.answer_form import AnswerForm, CallableTool, Calls, Notation, TextForm
from agentcache.errors import InvalidRequest
from agentcache.models.text.json_values import json_string, write_json
from agentcache.server.validate import Reader

_ANY_OBJECT = '{"type": "object"}'
# What vLLM calls them. Each is the whole form of an answer, in which no tool is called.
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools may be called, or must be.

    Args:
        name: the only one that may be; None for any.
        just_one: whether one call is all there may be.
        param: what the wire calls it.
    """

    may_call: bool = True
    must_call: bool = False
    name: str | None = None
    just_one: bool = False
    param: str = "tool_choice"


def read_tool_choice(body: Reader) -> ToolChoice:
    """OpenAI's: a word, or a function, whose name stands in `function` (chat) or beside the type (responses)."""
    just_one = not body.boolean("parallel_tool_calls", True)
    choice = body.get("tool_choice")
    if choice in (None, "auto"):
        return ToolChoice(just_one=just_one)
    if choice == "none":
        return ToolChoice(may_call=False)
    if choice == "required":
        return ToolChoice(must_call=True, just_one=just_one)
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        body.fail("tool_choice", 'must be "auto", "none", "required" or name a function')
    named = body.object("tool_choice")
    function = named.object("function") if named.get("name") is None else named
    return ToolChoice(must_call=True, name=function.required_string("name"), just_one=True)


def read_anthropic_tool_choice(body: Reader) -> ToolChoice:
    """Anthropic's, of type `auto`, `none`, `any` or `tool`."""
    choice = body.object("tool_choice")
    just_one = choice.boolean("disable_parallel_tool_use")
    match choice.string("type"):
        case None | "auto":
            return ToolChoice(just_one=just_one)
        case "none":
            return ToolChoice(may_call=False)
        case "any":
            return ToolChoice(must_call=True, just_one=just_one)
        case "tool":
            return ToolChoice(must_call=True, name=choice.required_string("name"), just_one=True)
        case _:
            choice.fail("type", 'must be "auto", "none", "any" or "tool"')


def read_form(
    body: Reader, text: TextForm | None, tools: Tools | None, choice: ToolChoice, schema: str
) -> AnswerForm | None:
    """The form; None for any.

    Args:
        text: that the dialect's own fields ask for.
        tools: that the model is shown, in OpenAI's shape.
        schema: what a tool of this dialect calls its arguments' schema.
    """
    guided = read_guided(body)
    if guided is not None and text is not None:
        body.fail(guided.param, f"cannot be combined with {text.param}")
    if guided is not None and choice.must_call:
        body.fail(guided.param, f"cannot be combined with a {choice.param} that demands a call")
    if choice.must_call:
        return AnswerForm(calls=Calls(_demanded(body, tools, choice, schema), choice.just_one))
    if guided is not None:
        return AnswerForm(guided)
    if text is None:
        return None
    return AnswerForm(text, Calls(_offered(body, tools, schema), choice.just_one) if tools else None)


def read_guided(body: Reader) -> TextForm | None:
    """vLLM's `guided_…`, of which there may be one."""
    given = [name for name in GUIDED if body.get(name) is not None]
    if len(given) > 1:
        body.fail(given[1], f"cannot be combined with {given[0]}")
    match given:
        case ["guided_json"]:
            return _schema_form(body, "guided_json")
        case ["guided_regex"]:
            return TextForm(Notation.REGEX, body.required_string("guided_regex"), "guided_regex")
        case ["guided_grammar"]:
            return TextForm(Notation.LARK, body.required_string("guided_grammar"), "guided_grammar")
        case ["guided_choice"]:
            return _choice_form(body, "guided_choice")
    return None


def read_response_format(body: Reader, name: str, schema_in: str | None = None) -> TextForm | None:
    """The object under `name`, of type `text`, `json_object` or `json_schema`.

    Args:
        schema_in: the object in it that holds the schema; None where it does so itself.
    """
    given = body.object(name)
    kind = given.string("type")
    if kind == "json_object":
        return TextForm(Notation.JSON_SCHEMA, _ANY_OBJECT, body.param(name))
    if kind == "json_schema":
        holder = given if schema_in is None else given.object(schema_in)
        if holder.get("schema") is None:
            holder.fail("schema", "is required")
        return _schema_form(holder, "schema")
    if body.get(name) is not None and kind != "text":
        given.fail("type", 'must be "text", "json_object" or "json_schema"')
    return None


def _schema_form(reader: Reader, name: str) -> TextForm:
    schema = reader.get(name)
    if not isinstance(schema, dict):
        reader.fail(name, "must be a JSON schema: an object")
    return TextForm(Notation.JSON_SCHEMA, _schema_text(schema, reader.param(name)), reader.param(name))


def _schema_text(schema: Any, param: str) -> str:
    """The schema as JSON. Raises InvalidRequest: a number in it is too large to be written."""
    try:
        return write_json(schema)
    except ValueError:
        raise InvalidRequest(
            f"{param} cannot be used as a JSON schema: a number in it is too large.", param=param
        ) from None


def _choice_form(body: Reader, name: str) -> TextForm:
    choices = body.get(name)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        body.fail(name, "must be a list of at least one string, none of them empty")
    # As a terminal there may be thousands.
    return TextForm(Notation.LARK, "start: CHOICE\nCHOICE: " + " | ".join(map(json_string, choices)), name)


def _demanded(body: Reader, tools: Tools | None, choice: ToolChoice, schema: str) -> tuple[CallableTool, ...]:
    """One of these is called, with arguments of its schema."""
    callable_tools = _callable_tools(body, tools or (), schema)
    if not callable_tools:
        body.fail(choice.param, "demands a call, but there are no tools")
    if choice.name is None:
        return callable_tools
    named = tuple(tool for tool in callable_tools if tool.name == choice.name)
    if not named:
        body.fail(choice.param, f"demands {choice.name!r:.80}, which is none of the tools")
    return named


def _offered(body: Reader, tools: Tools, schema: str) -> tuple[CallableTool, ...]:
    """The model may call one of these instead. As elsewhere, arguments are held to the schema of a strict one only."""
    return tuple(
        tool if given["function"].get("strict") is True else CallableTool(tool.name, _ANY_OBJECT, tool.param)
        for tool, given in zip(_callable_tools(body, tools, schema), tools, strict=True)
    )


def _callable_tools(body: Reader, tools: Tools, schema: str) -> tuple[CallableTool, ...]:
    places = {_name_of(tool): index for index, tool in enumerate(body.get("tools") or ())}
    made = []
    for tool in tools:
        function = tool["function"]
        param = body.param(f"tools[{places.get(function['name'], 0)}]")
        arguments = function.get("parameters")
        arguments = _ANY_OBJECT if arguments is None else _schema_text(arguments, f"{param}.{schema}")
        made.append(CallableTool(function["name"], arguments, f"{param}.{schema}", f"{param}.{_name_field(schema)}"))
    return tuple(made)


def _name_of(tool: Mapping[str, Any]) -> Any:
    """The name of a tool, in whichever shape it was sent."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else tool.get("name")


def _name_field(schema: str) -> str:
    """What stands beside the schema."""
    return schema.rpartition(".")[0] + ".name" if "." in schema else "name"
