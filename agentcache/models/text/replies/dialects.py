"""The dialects in which model families call tools, and the markers between which they think."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from agentcache.models.text.replies.calls import CallReader, CallSink, Tools
from agentcache.models.text.replies.field_calls import FieldCalls, FieldNotation
from agentcache.models.text.replies.json_calls import HeaderCall, ObjectCalls, function_name
from agentcache.models.text.replies.markers import Codes
from agentcache.models.text.replies.tagged_calls import TaggedCalls, Tags


@dataclass(frozen=True)
class DialectParts:
    """What a reader of calls is made of."""

    sink: CallSink
    tools: Tools
    codes: Codes


Open = Callable[[DialectParts], CallReader]


@dataclass(frozen=True)
class Dialect:
    """How a family calls tools.

    Args:
        opens: makes the reader for what stands behind a marker, by marker.
        noise: markers that say nothing by themselves.
        bare: whether a reply that begins with a JSON object may be a call.
    """

    opens: Mapping[str, Open] = field(default_factory=dict)
    noise: tuple[str, ...] = ()
    bare: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.noise)


def _objects(close: str) -> Open:
    return lambda parts: ObjectCalls(parts.sink, parts.codes.code(close), parts.tools)


def _header(close: str) -> Open:
    def make(parts: DialectParts) -> CallReader:
        objects = ObjectCalls(parts.sink, parts.codes.code(close), parts.tools)
        name_of: Callable[[str], str | None] = lambda header: function_name(parts.codes.spelled(header))  # noqa: E731
        return HeaderCall(parts.sink, parts.codes.code(close), name_of, objects)

    return make


def _tagged(close: str, tags: Tags) -> Open:
    return lambda parts: TaggedCalls(parts.sink, parts.codes.code(close), parts.tools, tags.coded(parts.codes.code))


def _fields(close: str, notation: FieldNotation) -> Open:
    return lambda parts: FieldCalls(parts.sink, parts.codes.code(close), parts.tools, notation.coded(parts.codes.code))


def bare_object(parts: DialectParts) -> CallReader:
    """Reads a reply that is nothing but JSON: a call if it names one of the request's tools."""
    return ObjectCalls(parts.sink, "", parts.tools, must_be_known=True)


_XML = Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", strips=False)
_KEYS = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", untyped=True)
_LONGCAT = Tags(
    "", "", "<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>", "", untyped=True
)
_INVOKE = Tags("<invoke", ">", "<parameter", ">", "", "</parameter>", "</invoke>")
_ATEM = Tags("<atem:invoke", ">", "<atem:parameter", ">", "", "</atem:parameter>", "</atem:invoke>", untyped=True)
_NAMED = Tags("", ">", "<param", ">", "", "</param>", "</function>", cdata=True)
_XTML = Tags(
    "<|open|>call", "<|sep|>", "<|open|>argument", "<|sep|>", "", "<|close|>argument<|sep|>", "<|close|>call<|sep|>"
)

_GEMMA_4 = FieldNotation(",", "call:", "{", "}", ":", ('<|"|>', '"'))
_FUNCTION_GEMMA = FieldNotation(",", "call:", "{", "}", ":", ("<escape>", '"'))
_PYTHON = FieldNotation("[],;", "", "(", ")", "=", ('"""', "'''", '"', "'"))

# By mlx-lm's names of its parsers, and names of ours for what it does not read.
DIALECTS: dict[str, Dialect] = {
    "json_tools": Dialect({"<tool_call>": _tagged("</tool_call>", _XML)}, ("</tool_call>",)),
    "qwen3_coder": Dialect(
        {"<tool_call>": _tagged("</tool_call>", _XML), "<function=": _tagged("", replace(_XML, call=""))},
        ("</tool_call>", "</function>", "</parameter>"),
    ),
    "functions": Dialect({"<function=": _tagged("", replace(_XML, call=""))}, ("</function>",)),
    "glm47": Dialect(
        {"<tool_call>": _tagged("</tool_call>", _KEYS)},
        ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "longcat": Dialect(
        {"<longcat_tool_call>": _tagged("</longcat_tool_call>", _LONGCAT)},
        (
            "</longcat_tool_call>",
            "<longcat_arg_key>",
            "</longcat_arg_key>",
            "<longcat_arg_value>",
            "</longcat_arg_value>",
        ),
    ),
    "minimax_m2": Dialect({"<minimax:tool_call>": _tagged("</minimax:tool_call>", _INVOKE)}, ("</minimax:tool_call>",)),
    "minicpm5": Dialect({"<function name=": _tagged("", _NAMED)}, ("</function>",)),
    "muse_spark": Dialect(
        {"<atem:function_calls>": _tagged("</atem:function_calls>", _ATEM)}, ("</atem:function_calls>",)
    ),
    "kimi_k3": Dialect(
        {"<|open|>tools<|sep|>": _tagged("<|close|>tools<|sep|>", _XTML)},
        (
            "<|close|>tools<|sep|>",
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|open|>",
            "<|close|>",
            "<|sep|>",
        ),
    ),
    "kimi_k2": Dialect(
        {"<|tool_call_begin|>": _header("<|tool_call_end|>")},
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
    ),
    "deepseek": Dialect(
        {
            "<｜tool▁call▁begin｜>": _header("<｜tool▁call▁end｜>"),
            "<|tool_call_begin|>": _header("<|tool_call_end|>"),
        },
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<|tool_calls_begin|>",
            "<|tool_calls_end|>",
            "<|tool_call_end|>",
            "<|tool_sep|>",
        ),
    ),
    "mistral": Dialect({"[TOOL_CALLS]": _header("")}, ("[ARGS]", "[CALL_ID]")),
    "granite": Dialect({"<|tool_call|>": _objects("<|/tool_call|>")}, ("<|/tool_call|>",)),
    "llama3": Dialect({"<|python_tag|>": _objects("")}, ("<|eom_id|>",), bare=True),
    "gemma4": Dialect({"<|tool_call>": _fields("<tool_call|>", _GEMMA_4)}, ("<tool_call|>", '<|"|>')),
    "function_gemma": Dialect(
        {"<start_function_call>": _fields("<end_function_call>", _FUNCTION_GEMMA)},
        ("<end_function_call>", "<escape>"),
    ),
    "pythonic": Dialect({"<|tool_call_start|>": _fields("<|tool_call_end|>", _PYTHON)}, ("<|tool_call_end|>",)),
}
DIALECTS["laguna"] = DIALECTS["glm47"]

# Between what a model thinks: the first of the pair may stand in the prompt already.
THOUGHTS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<thought>", "</thought>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
