"""Tool-call formats (dialects) and reasoning markers of model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from agentcache.text.replies.calls import CallReader, CallSink, Tools
from agentcache.text.replies.field_calls import FieldCalls, FieldNotation
from agentcache.text.replies.format import ReplyFormat
from agentcache.text.replies.json_calls import HeaderCall, ObjectCalls, function_name
from agentcache.text.replies.markers import Codes
from agentcache.text.replies.nested_calls import NestedCalls
from agentcache.text.replies.recipients import HeaderEnd, LineCalls
from agentcache.text.replies.tagged_calls import TaggedCalls, Tags


@dataclass(frozen=True)
class DialectParts:
    """Inputs of a call parser; `marker` is the opening marker if clients may see it, else empty."""

    sink: CallSink
    tools: Tools
    codes: Codes
    marker: str = ""


Open = Callable[[DialectParts], CallReader]


@dataclass(frozen=True)
class Dialect:
    """Tool-call format of a model family.

    Args:
        opens: parser factories by opening marker.
        noise: dropped markers.
        ends: markers after which a reply with calls may end, without a turn's end.
        bare: whether a reply that begins with a JSON object may be a call.
        hints: texts that identify the dialect in a chat template or its output; the opening markers if empty.
    """

    opens: Mapping[str, Open] = field(default_factory=dict)
    noise: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: bool = False
    hints: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.noise)

    @property
    def signs(self) -> tuple[str, ...]:
        return self.hints or (*self.opens,)


def _objects(close: str) -> Open:
    return lambda parts: ObjectCalls(parts.sink, parts.codes.code(close), parts.tools)


def _keyed(close: str) -> Open:
    return lambda parts: ObjectCalls(parts.sink, parts.codes.code(close), parts.tools, is_keyed=True)


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


def _nested(close: str, sign: str) -> Open:
    return lambda parts: NestedCalls(parts.sink, parts.codes.code(close), parts.tools, parts.codes.code(sign))


def _headed(message: str) -> Open:
    return lambda parts: HeaderEnd(parts.codes.code(message))


def _lines(parts: DialectParts) -> CallReader:
    return LineCalls(parts.sink, parts.tools, parts.marker)


def bare_object(parts: DialectParts) -> CallReader:
    """Parser of a reply that is only JSON: a call if it names a tool of the request."""
    return ObjectCalls(parts.sink, "", parts.tools, must_be_known=True)


_XML = Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", on_lines=True)
_PYTHON_XML = replace(_XML, untyped=True, on_lines=False)
_KEYS = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", untyped=True)
_LONGCAT = Tags(
    "", "", "<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>", "", untyped=True
)
_HUNYUAN = Tags(
    "<tool_call:opensource>",
    "<tool_sep:opensource>",
    "<arg_key:opensource>",
    "</arg_key:opensource>",
    "<arg_value:opensource>",
    "</arg_value:opensource>",
    "</tool_call:opensource>",
    untyped=True,
)
_INVOKE = Tags("<invoke", ">", "<parameter", ">", "", "</parameter>", "</invoke>")
_DSML = Tags(
    "<｜DSML｜invoke", ">", "<｜DSML｜parameter", ">", "", "</｜DSML｜parameter>", "</｜DSML｜invoke>", untyped=True
)
_ATEM = Tags("<atem:invoke", ">", "<atem:parameter", ">", "", "</atem:parameter>", "</atem:invoke>", untyped=True)
_NAMED = Tags("", ">", "<param", ">", "", "</param>", "</function>", cdata=True)
_XTML = Tags(
    "<|open|>call", "<|sep|>", "<|open|>argument", "<|sep|>", "", "<|close|>argument<|sep|>", "<|close|>call<|sep|>"
)

_GEMMA_4 = FieldNotation(",", "call:", "{", "}", ":", ('<|"|>', '"'))
_FUNCTION_GEMMA = FieldNotation(",", "call:", "{", "}", ":", ("<escape>", '"'))
_PYTHON = FieldNotation("[],;", "", "(", ")", "=", ('"""', "'''", '"', "'"))

_DSML_NOISE = ("</｜DSML｜tool_calls>", "</｜DSML｜function_calls>")
_DSML_OPENS = {close.replace("/", ""): _tagged(close, _DSML) for close in _DSML_NOISE}

# By mlx-lm's parser name, or our own. The order matters: see `find_dialect`.
DIALECTS: dict[str, Dialect] = {
    "qwen3_coder": Dialect(
        {"<tool_call>": _tagged("</tool_call>", _XML), "<function=": _tagged("", replace(_XML, call=""))},
        ("</tool_call>", "</function>", "</parameter>"),
        hints=("<tool_call>\n<function=", "<tool_call>\\n<function="),
    ),
    "glm47": Dialect(
        {"<tool_call>": _tagged("</tool_call>", _KEYS)},
        ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        hints=("<arg_key>",),
    ),
    "json_tools": Dialect({"<tool_call>": _tagged("</tool_call>", _XML)}, ("</tool_call>",)),
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
    "hunyuan": Dialect(
        {"<tool_calls:opensource>": _tagged("</tool_calls:opensource>", _HUNYUAN)},
        ("</tool_calls:opensource>",),
        hints=("'<tool_calls{}>'.format",),
    ),
    "seed_oss": Dialect({"<seed:tool_call>": _tagged("</seed:tool_call>", _PYTHON_XML)}, ("</seed:tool_call>",)),
    "minimax_m2": Dialect({"<minimax:tool_call>": _tagged("</minimax:tool_call>", _INVOKE)}, ("</minimax:tool_call>",)),
    # Each parses both: a tokenizer alone does not identify one.
    "deepseek_v4": Dialect(_DSML_OPENS, _DSML_NOISE, hints=("｜DSML｜tool_calls", "dsml_token + 'tool_calls")),
    "deepseek_v32": Dialect(_DSML_OPENS, _DSML_NOISE, hints=("｜DSML｜",)),
    "minicpm5": Dialect({"<function name=": _tagged("", _NAMED)}, ("</function>",)),
    "muse_spark": Dialect(
        {
            "<atem:function_calls>": _tagged("</atem:function_calls>", _ATEM),
            "<|start|>assistant": _headed("<|message|>"),
        },
        ("</atem:function_calls>", "to=self<|message|>", "<|eom|>", "<|eot|>"),
        hints=("<atem:function_calls>",),
    ),
    "minimax_m3": Dialect(
        {"]<]minimax[>[<tool_call>": _nested("]<]minimax[>[</tool_call>", "]<]minimax[>[")},
        ("]<]minimax[>[",),
        hints=("]<]minimax[>[",),
    ),
    "functionary": Dialect({">>>": _lines}, hints=(">>>${recipient}", ">>>all\n")),
    "kimi_k3": Dialect(
        {"<|open|>tools<|sep|>": _tagged("<|close|>tools<|sep|>", _XTML)},
        (
            "<|close|>tools<|sep|>",
            "<|close|>think<|sep|>",
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|open|>",
            "<|close|>",
            "<|sep|>",
        ),
        hints=("<|open|>",),
    ),
    "kimi_k2": Dialect(
        {"<|tool_call_begin|>": _header("<|tool_call_end|>")},
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
        hints=("<|tool_calls_section_begin|>",),
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
        hints=("<｜tool▁calls▁begin｜>", "<|tool_calls_end|>"),
    ),
    "solar": Dialect(
        {"<|tool_call:begin|>": _header("<|tool_call:end|>")},
        (
            "<|begin|>assistant",
            "<|content|>",
            "<|end|>",
            "<|tool_calls|>",
            "<|calls|>",
            "<|tool_call:name|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
        ),
        ends=("<|calls|>",),
    ),
    "mistral": Dialect({"[TOOL_CALLS]": _header("")}, ("[ARGS]", "[CALL_ID]")),
    "granite": Dialect({"<|tool_call|>": _objects("<|/tool_call|>")}, ("<|/tool_call|>",)),
    "apertus": Dialect(
        {"<|tools_prefix|>": _keyed("<|tools_suffix|>")}, ("<|tools_suffix|>",), ends=("<|tools_suffix|>",)
    ),
    "cohere": Dialect(
        {"<|START_ACTION|>": _objects("<|END_ACTION|>")},
        ("<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "command_r": Dialect({"Action:\n```json": _objects("```"), "Action: ```json": _objects("```")}),
    "minimax_m1": Dialect(
        {"<tool_calls>": _objects("</tool_calls>")}, ("</tool_calls>",), hints=("<tool_calls>\n{", "<tool_calls>\\n{")
    ),
    "apriel": Dialect({"<tool_calls>": _objects("</tool_calls>")}, ("</tool_calls>", "[END FINAL RESPONSE]")),
    "nemotron": Dialect({"<TOOLCALL>": _objects("</TOOLCALL>")}, ("</TOOLCALL>",)),
    "gigachat": Dialect({"<|function_call|>": _objects("")}, ("<|message_sep|>",)),
    "gigachat_3": Dialect(
        {"<|message_sep|>\n\nfunction call<|role_sep|>": _objects("")},
        ("<|message_sep|>",),
        hints=("function call<|role_sep|>",),
    ),
    "functools": Dialect({"functools[": _objects("")}),
    "gemma4": Dialect(
        {"<|tool_call>": _fields("<tool_call|>", _GEMMA_4)},
        ("<tool_call|>", '<|"|>', "<|tool_response>"),
        ends=("<|tool_response>",),
    ),
    "function_gemma": Dialect(
        {"<start_function_call>": _fields("<end_function_call>", _FUNCTION_GEMMA)},
        ("<end_function_call>", "<escape>"),
    ),
    "pythonic": Dialect(
        {"<|tool_call_start|>": _fields("<|tool_call_end|>", _PYTHON)},
        ("<|tool_call_end|>",),
        hints=("<|tool_list_start|>", "<|tool_call_start|>"),
    ),
    "functions": Dialect({"<function=": _tagged("", replace(_XML, call=""))}, ("</function>",)),
    "llama3": Dialect(
        {"<|python_tag|>": _objects("")},
        ("<|eom_id|>",),
        bare=True,
        hints=("<|python_tag|>", '"parameters": dictionary of argument name'),
    ),
}
DIALECTS["laguna"] = DIALECTS["glm47"]


def call_ends(form: ReplyFormat) -> tuple[str, ...]:
    """Return the `ends` of a format's dialect."""
    return DIALECTS[form.dialect].ends if form.dialect in DIALECTS else ()


# Markers around reasoning. The prompt may end with the first of a pair.
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
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|think|>", "<|end|><|begin|>assistant"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("<thinking>", "</thinking>"),
    ("to=self<|message|>", "<|eom|>"),
)
