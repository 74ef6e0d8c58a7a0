"""Random JSON schemas, of what llguidance knows, small enough for a random model to fill in soon."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from agentcache.api.answer_form import AnswerForm, CallableTool, Calls, Notation, TextForm

# What is above stands for markers, and becomes U+FFFD in what a model says.
_CHARACTERS = st.characters(max_codepoint=0x10EFFF, exclude_categories=["Cs"])
_LEAVES: list[st.SearchStrategy[Any]] = [
    st.integers(-50, 50).flatmap(
        lambda low: st.integers(0, 60).map(lambda size: {"type": "integer", "minimum": low, "maximum": low + size})
    ),
    st.just({"type": "number", "minimum": -3.5, "exclusiveMaximum": 12}),
    st.integers(0, 3).map(lambda low: {"type": "string", "minLength": low, "maxLength": low + 4}),
    st.sampled_from(["^[a-c]{1,3}$", r"^\d{2}-x?$", "^(yes|no)$"]).map(lambda rx: {"type": "string", "pattern": rx}),
    st.sampled_from(["date", "uuid", "ipv4", "time"]).map(lambda name: {"type": "string", "format": name}),
    st.lists(st.text(_CHARACTERS, max_size=6), min_size=1, max_size=4, unique=True).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([True, None, 7, 'ü\n"', [1, 2], {"a": 1}]).map(lambda value: {"const": value}),
    st.sampled_from(["boolean", "null"]).map(lambda kind: {"type": kind}),
]
_NAMES = st.lists(st.text('ab"\\ é_{}', min_size=1, max_size=3), min_size=0, max_size=3, unique=True)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.builds(
        lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": low + 1},
        inner,
        st.integers(0, 2),
    )
    return st.one_of(lists, objects(inner), st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}))


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = {name: draw(inner) for name in draw(_NAMES)}
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# What can stand in a tag of its own.
_TEXTS: list[st.SearchStrategy[Any]] = [
    st.just({"type": "string"}),
    st.just({}),
    st.integers(0, 3).map(lambda low: {"type": "string", "minLength": low}),
    st.integers(0, 3).map(lambda low: {"type": "string", "minLength": low, "maxLength": low + 2, "description": "d"}),
    st.lists(st.text("ab <>/=\n|é", max_size=4), min_size=1, max_size=3, unique=True).map(
        lambda texts: {"type": "string", "enum": texts}
    ),
    st.sampled_from([{"$ref": "#/$defs/Kind"}, {"allOf": [{"$ref": "#/$defs/Kind"}], "default": "x"}]),
]
_OTHERS: list[st.SearchStrategy[Any]] = [
    st.sampled_from([{"type": "integer", "maximum": 99}, {"type": ["boolean", "null"]}, {"enum": [1, 2, 30]}]),
    st.just({"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}),
    st.just({"$ref": "#/$defs/Place"}),
    st.just({"anyOf": [{"type": "integer", "minimum": 3, "maximum": 7}, {"type": "null"}]}),
]
_DEFINITIONS = {
    "Kind": {"type": "string", "enum": ["big", "small"]},
    "Place": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}, "additionalProperties": False},
}


@st.composite
def tagged_schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Of the arguments of tools, as clients write them."""
    text = st.one_of(_TEXTS)
    nullable = text.filter(lambda schema: schema.get("type") == "string").map(
        lambda schema: {"anyOf": [schema, {"type": "null"}], "title": "t"}
    )
    names = draw(st.lists(st.from_regex(r"[a-zé_][\w.\-]{0,3}", fullmatch=True), max_size=3, unique=True))
    properties = {name: draw(text | nullable | st.one_of(_OTHERS)) for name in names}
    required = [name for name in names if draw(st.booleans())]
    closed = {"additionalProperties": False} if draw(st.booleans()) else {}
    return {"type": "object", "properties": properties, "required": required, "$defs": _DEFINITIONS} | closed


schemas = st.recursive(st.one_of(_LEAVES), _larger, max_leaves=6)
object_schemas = objects(schemas)


def of_schema(schema: Any) -> AnswerForm:
    return AnswerForm(TextForm(Notation.JSON_SCHEMA, json.dumps(schema)))


def calling(tools: list[dict[str, Any]], *, just_one: bool = False) -> AnswerForm:
    """One of these tools, in OpenAI's shape, is called."""
    functions = [tool["function"] for tool in tools]
    made = tuple(CallableTool(each["name"], json.dumps(each.get("parameters", {}))) for each in functions)
    return AnswerForm(calls=Calls(made, just_one))


# What a random model can call before it tires.
SHORT_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "maximum": 999}},
                "required": ["at"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"additionalProperties": False}}},
]
