"""Reads the form demanded of an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.api.answer_form import AnswerForm, CallableTool, Calls, Notation, TextForm
from agentcache.errors import InvalidRequest
from agentcache.server.context import Call
from agentcache.server.validate import Reader
from agentcache.text.json_values import json_string, parse_json, write_json

_ANY_OBJECT = '{"type": "object"}'
# vLLM; they exclude tool calls.
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
# vLLM's newer field, SGLang's, Ollama's.
FORM_FIELDS = (*GUIDED, "structured_outputs", "json_schema", "regex", "format")
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
# Keys that a wrapper around a JSON schema lacks.
_SCHEMA_KEYS = ("type", "properties", "$ref", "$defs", "anyOf", "oneOf", "allOf", "enum", "const", "items", "required")

Tools = Sequence[Mapping[str, Any]]
Find = Callable[[str], str | None]


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may or must call tools; `names` allows some, None all."""

    may_call: bool = True
    must_call: bool = False
    names: tuple[str, ...] | None = None
    just_one: bool = False
    param: str = "tool_choice"


def read_tool_choice(body: Reader, find: Find = lambda word: None) -> ToolChoice:
    """Read `tool_choice` in any dialect; `find` maps a name or type to a tool's name."""
    just_one = not body.boolean("parallel_tool_calls", True)
    choice = body.get("tool_choice")
    if choice is None or isinstance(choice, str):
        return _choice_of_word(choice, just_one, find)
    if not isinstance(choice, dict):
        body.fail("tool_choice", 'must be "auto", "none", "required" or name a function')
    given = body.object("tool_choice")
    just_one = just_one or given.boolean("disable_parallel_tool_use")
    kind = given.string("type")
    if kind in ("function", "tool", "custom") or (kind is None and not {"name", "function"}.isdisjoint(choice)):
        return _choice_of(_named(given, kind), find)
    if kind == "allowed_tools":
        return _allowed(body, given, just_one, find)
    if kind in (None, *_WORDS):
        return _choice_of_word(kind, just_one, find)
    if (found := find(kind or "")) is not None:
        return _choice_of(found, find)
    given.fail(
        "type", 'must be "auto", "none", "any", "required", "tool", "function", "allowed_tools" or a tool of tools'
    )


_WORDS = ("", "auto", "none", "any", "required")


def _choice_of_word(word: str | None, just_one: bool, find: Find) -> ToolChoice:
    if word in (None, "", "auto"):
        return ToolChoice(just_one=just_one)
    if word == "none":
        return ToolChoice(may_call=False)
    if word in ("any", "required"):
        return ToolChoice(must_call=True, just_one=just_one)
    return _choice_of(word or "", find)


def _choice_of(name: str, find: Find) -> ToolChoice:
    return ToolChoice(must_call=True, names=(find(name) or name,), just_one=True)


def _named(given: Reader, kind: str | None) -> str:
    if given.get("name") is not None or kind == "tool":
        return given.required_string("name")
    inner = "custom" if kind == "custom" and isinstance(given.get("custom"), dict) else "function"
    return given.object(inner).required_string("name")


def _allowed(body: Reader, given: Reader, just_one: bool, find: Find) -> ToolChoice:
    holder = given.object("allowed_tools") if isinstance(given.get("allowed_tools"), dict) else given
    if holder.get("tools") is None:
        body.fail("tool_choice", "must list the tools that are allowed")
    mode = holder.string("mode") or "auto"
    if mode not in ("auto", "required"):
        holder.fail("mode", 'must be "auto" or "required"')
    words = (_name_of(tool.value) or tool.string("type") for tool in holder.objects("tools"))
    names = tuple(find(word) or word for word in words if word is not None)
    return ToolChoice(must_call=mode == "required", names=names, just_one=just_one)


def read_form(
    call: Call,
    text: TextForm | None,
    tools: Tools | None,
    choice: ToolChoice,
    schema: str,
    left_out: Collection[str] = (),
    strict: Collection[str] = (),
) -> AnswerForm | None:
    """Return the demanded form, if any.

    `text`: the dialect's own form; `schema`: path of a tool's argument schema; `left_out`: names and types of server
    tools; `strict`: names of strict tools not shown as such.
    """
    body = call.body
    whole = read_whole_form(body)
    if whole is not None and text is not None:
        body.fail(whole.param, f"cannot be combined with {text.param}")
    if choice.must_call and _is_left_out(choice, tools, left_out):
        call.notes.add(f"{choice.param}: it demands a tool that was left out; the model answers without one")
    elif choice.must_call:
        if whole is not None:
            body.fail(whole.param, f"cannot be combined with a {choice.param} that demands a call")
        return AnswerForm(calls=Calls(_demanded(body, tools, choice, schema), choice.just_one))
    if whole is not None:
        return AnswerForm(whole)
    if text is None:
        return None
    return AnswerForm(text, Calls(_offered(body, tools, schema, strict), choice.just_one) if tools else None)


def _is_left_out(choice: ToolChoice, tools: Tools | None, left_out: Collection[str]) -> bool:
    if choice.names is None:
        return bool(left_out) and not tools
    return bool(choice.names) and all(name in left_out for name in choice.names)


def read_whole_form(body: Reader) -> TextForm | None:
    """Read the one field, if any, of vLLM, SGLang or Ollama."""
    given = [(body, name) for name in (*GUIDED, "json_schema", "regex", "format") if body.get(name) not in (None, "")]
    structured = body.object("structured_outputs")
    for name, value in structured.value.items():
        if name in _STRUCTURED and value not in (None, False):
            given.append((structured, name))
        elif name == "structural_tag" and value is not None:
            structured.fail(name, "is not supported", code="unsupported_parameter")
    if len(given) > 1:
        reader, name = given[1]
        reader.fail(name, f"cannot be combined with {given[0][0].param(given[0][1])}")
    return _whole_form(*given[0]) if given else None


def _whole_form(reader: Reader, name: str) -> TextForm:
    param = reader.param(name)
    match name.removeprefix("guided_"):
        case "regex":
            return TextForm(Notation.REGEX, reader.required_string(name), param)
        case "grammar":
            return TextForm(Notation.LARK, reader.required_string(name), param)
        case "choice":
            return _choice_form(reader, name)
        case "json_object":
            return TextForm(Notation.JSON_SCHEMA, _ANY_OBJECT, param)
        case "format" if reader.get(name) in ("json", "json_object"):
            return TextForm(Notation.JSON_SCHEMA, _ANY_OBJECT, param)
    return _schema_form(reader, name)


def read_text_form(body: Reader, *more: tuple[Reader, str]) -> TextForm | None:
    """Read the one text format, if any, in fields of all dialects and `more`."""
    output = body.object("output_config")
    places = [*more, (body, "response_format"), (output, "format"), (body, "output_format")]
    forms = [
        read_response_format(each, name, "json_schema" if name == "response_format" else None) for each, name in places
    ]
    given = [form for form in forms if form is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{given[1].param} cannot be combined with {given[0].param}.", param=given[1].param)
    return given[0] if given else None


def read_response_format(body: Reader, name: str, schema_in: str | None = None) -> TextForm | None:
    """Read the format `name`, its schema in the object `schema_in` if given."""
    given = body.object(name)
    kind = given.string("type")
    if kind in ("json_object", "json", "json_schema"):
        holder, schema = _schema_place(given, schema_in)
        if holder.get(schema) is not None:
            return _schema_form(holder, schema)
        if kind == "json_schema":
            holder.fail(schema, "is required")
        return TextForm(Notation.JSON_SCHEMA, _ANY_OBJECT, body.param(name))
    if kind == "regex":
        place = next((each for each in ("regex", "value") if given.get(each) is not None), "pattern")
        return TextForm(Notation.REGEX, given.required_string(place), given.param(place))
    if body.get(name) is not None and kind != "text":
        given.fail("type", 'must be "text", "json_object", "json_schema" or "regex"')
    return None


def _schema_place(given: Reader, schema_in: str | None) -> tuple[Reader, str]:
    wrapper = given.get("json_schema")
    if isinstance(wrapper, dict) and wrapper.get("schema") is not None:
        return given.object("json_schema"), "schema"
    for name in ("schema", "value"):  # TGI: `value`
        if given.get(name) is not None:
            return given, name
    if isinstance(wrapper, dict) and not set(_SCHEMA_KEYS).isdisjoint(wrapper):
        return given, "json_schema"
    return (given if schema_in is None else given.object(schema_in)), "schema"


def _schema_form(reader: Reader, name: str) -> TextForm:
    schema = reader.get(name)
    if isinstance(schema, str):  # vLLM, SGLang
        try:
            schema = parse_json(schema)
        except ValueError as error:
            reader.fail(name, f"is no JSON schema: {error}")
    if not isinstance(schema, dict):
        reader.fail(name, "must be a JSON schema: an object")
    return TextForm(Notation.JSON_SCHEMA, write_json(schema), reader.param(name))


def _choice_form(body: Reader, name: str) -> TextForm:
    choices = body.get(name)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        body.fail(name, "must be a list of at least one string, none of them empty")
    # One terminal: there may be thousands.
    return TextForm(Notation.LARK, "start: CHOICE\nCHOICE: " + " | ".join(map(json_string, choices)), body.param(name))


def _demanded(body: Reader, tools: Tools | None, choice: ToolChoice, schema: str) -> tuple[CallableTool, ...]:
    callable_tools = _callable_tools(body, tools or (), schema)
    if not callable_tools:
        body.fail(choice.param, "demands a call, but there are no tools")
    if choice.names is None:
        return callable_tools
    named = tuple(tool for tool in callable_tools if tool.name in choice.names)
    if not named:
        body.fail(choice.param, f"demands {', '.join(choice.names)!r:.80}, which is none of the tools")
    return named


def _offered(body: Reader, tools: Tools, schema: str, strict: Collection[str]) -> tuple[CallableTool, ...]:
    return tuple(
        tool
        if tool.name in strict or given["function"].get("strict") is True
        else CallableTool(tool.name, _ANY_OBJECT, tool.param)
        for tool, given in zip(_callable_tools(body, tools, schema), tools, strict=True)
    )


def _callable_tools(body: Reader, tools: Tools, schema: str) -> tuple[CallableTool, ...]:
    name_field = schema.rpartition(".")[0] + ".name" if "." in schema else "name"
    places = {_name_of(tool): index for index, tool in enumerate(body.get("tools") or ())}
    made = []
    for tool in tools:
        function = tool["function"]
        place = places.get(function["name"])
        param = "tools" if place is None else body.param(f"tools[{place}]")  # added in the conversation
        arguments = function.get("parameters")
        arguments = _ANY_OBJECT if arguments is None else write_json(arguments)
        made.append(CallableTool(function["name"], arguments, f"{param}.{schema}", f"{param}.{name_field}"))
    return tuple(made)


def _name_of(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    name = (function if isinstance(function, Mapping) else tool).get("name")
    return name if isinstance(name, str) else None
