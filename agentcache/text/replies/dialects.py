"""Tool-call formats (dialects) and reasoning markers of model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from agentcache.api.model import ReplyFormat
from agentcache.text.marks import Codes
from agentcache.text.replies.call_syntax import (
    IS_STRING,
    NAME,
    TYPE,
    ArgumentSyntax,
    CallSyntax,
    FieldSyntax,
    as_fields,
    as_object,
    listed,
)
from agentcache.text.replies.calls import CallReader, CallSink, Tools
from agentcache.text.replies.field_calls import FieldCalls, FieldNotation
from agentcache.text.replies.json_calls import HeaderCall, HeaderEnd, LineCalls, ObjectCalls, function_name
from agentcache.text.replies.nested_calls import NestedCalls
from agentcache.text.replies.tagged_calls import TaggedCalls, Tags


@dataclass(frozen=True)
class DialectParts:
    """Inputs of a call parser; `marker` is empty if clients must not see it."""

    sink: CallSink
    tools: Tools
    codes: Codes
    marker: str = ""


Open = Callable[[DialectParts], CallReader]


@dataclass(frozen=True)
class Dialect:
    """How a model family's calls are read, written and recognised.

    Args:
        noise: dropped markers.
        ends: markers after which a reply with calls may end.
        bare: a JSON object at a reply's start may be a call.
        hints: identify the dialect; if empty, opening markers do.
        writes: syntax of demanded calls, which the parsers must read.
        writes_with: a token, and the syntax of models with it.
    """

    opens: Mapping[str, Open]
    noise: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: bool = False
    hints: tuple[str, ...] = ()
    writes: CallSyntax = field(kw_only=True)
    writes_with: tuple[str, CallSyntax] | None = None

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
    """Parser of a JSON reply: a call if it names a tool of the request."""
    return ObjectCalls(parts.sink, "", parts.tools, must_be_known=True)


def _argument(tags: Tags, attribute: str = "", kind: str = "") -> ArgumentSyntax:
    before, after = (f' {attribute}="', '"') if attribute else ("", "")
    name_close = f"{after}{kind}{tags.argument_end}"
    return ArgumentSyntax(tags.argument + before, name_close, tags.value_end, tags.value, tags.on_lines)


def _each_in_tags(
    opening: str, closing: str, tags: Tags, noise: tuple[str, ...] = (), hints: tuple[str, ...] = ()
) -> Dialect:
    line = "\n" if tags.call else ""
    writes = CallSyntax(
        f"{opening}{line}{tags.call}{NAME}{tags.name_end}\n",
        f"{tags.call_end}{line}{closing}",
        argument=_argument(tags),
    )
    return Dialect({opening: _tagged(closing, tags)}, (closing, *noise), hints=hints, writes=writes)


def _all_in_tags(
    opening: str,
    closing: str,
    tags: Tags,
    noise: tuple[str, ...] = (),
    hints: tuple[str, ...] = (),
    *,
    tool: str = "name",
    argument: str = "name",
    kind: str = "",
    line: str = "\n",
) -> Dialect:
    before, after = (f' {tool}="', '"') if tool else ("", "")
    writes = CallSyntax(
        f"{tags.call}{before}{NAME}{after}{tags.name_end}{line}",
        f"{tags.call_end}{line}",
        "",
        f"{opening}{line}",
        closing,
        _argument(tags, argument, kind),
    )
    return Dialect({opening: _tagged(closing, tags)}, (closing, *noise), hints=hints, writes=writes)


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


def _in_fields(
    opening: str, closing: str, notation: FieldNotation, noise: tuple[str, ...], ends: tuple[str, ...] = ()
) -> Dialect:
    syntax = FieldSyntax(notation.assign, ",", notation.quotes[0])
    writes = as_fields(opening, notation.opening, notation.open, notation.close, closing, syntax)
    return Dialect({opening: _fields(closing, notation)}, (closing, *noise), ends, writes=writes)


_GEMMA_4 = FieldNotation(",", "call:", "{", "}", ":", ('<|"|>', '"'))
_FUNCTION_GEMMA = FieldNotation(",", "call:", "{", "}", ":", ("<escape>", '"'))
_PYTHON = FieldNotation("[],;", "", "(", ")", "=", ('"""', "'''", '"', "'"))

_DSML_SECTIONS = ("tool_calls", "function_calls")

_TOLD = "json_tools"


def _dsml(section: str, hints: tuple[str, ...]) -> Dialect:
    # DeepSeek V3.2 and V4 both read both sections: a tokenizer does not identify one.
    opens = {f"<｜DSML｜{each}>": _tagged(f"</｜DSML｜{each}>", _DSML) for each in _DSML_SECTIONS}
    writes = _all_in_tags(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>", _DSML, kind=f' string="{IS_STRING}"').writes
    return Dialect(opens, tuple(f"</｜DSML｜{each}>" for each in _DSML_SECTIONS), hints=hints, writes=writes)


_DEEPSEEK = CallSyntax(
    f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)


# By mlx-lm's parser name, or our own, in order (`find_dialect`).
DIALECTS: dict[str, Dialect] = {
    "qwen3_coder": replace(
        _each_in_tags("<tool_call>", "</tool_call>", _XML),
        opens={"<tool_call>": _tagged("</tool_call>", _XML), "<function=": _tagged("", replace(_XML, call=""))},
        noise=("</tool_call>", "</function>", "</parameter>"),
        hints=("<tool_call>\n<function=", "<tool_call>\\n<function="),
    ),
    "glm47": _each_in_tags(
        "<tool_call>", "</tool_call>", _KEYS, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), ("<arg_key>",)
    ),
    "json_tools": Dialect(
        {"<tool_call>": _tagged("</tool_call>", _XML)},
        ("</tool_call>",),
        writes=as_object("<tool_call>\n", "\n</tool_call>"),
    ),
    "longcat": _each_in_tags(
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        _LONGCAT,
        ("<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
    ),
    "hunyuan": _all_in_tags(
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        _HUNYUAN,
        hints=("'<tool_calls{}>'.format",),
        tool="",
        argument="",
    ),
    "seed_oss": _each_in_tags("<seed:tool_call>", "</seed:tool_call>", _PYTHON_XML),
    "minimax_m2": _all_in_tags("<minimax:tool_call>", "</minimax:tool_call>", _INVOKE),
    "deepseek_v4": _dsml("tool_calls", ("｜DSML｜tool_calls", "dsml_token + 'tool_calls")),
    "deepseek_v32": _dsml("function_calls", ("｜DSML｜",)),
    "minicpm5": Dialect(
        {"<function name=": _tagged("", _NAMED)},
        ("</function>",),
        writes=CallSyntax(f'<function name="{NAME}">', "</function>", argument=_argument(_NAMED, "name")),
    ),
    "muse_spark": replace(
        _all_in_tags("<atem:function_calls>", "</atem:function_calls>", _ATEM),
        opens={
            "<atem:function_calls>": _tagged("</atem:function_calls>", _ATEM),
            "<|start|>assistant": _headed("<|message|>"),
        },
        noise=("</atem:function_calls>", "to=self<|message|>", "<|eom|>", "<|eot|>"),
        hints=("<atem:function_calls>",),
    ),
    "minimax_m3": Dialect(
        {"]<]minimax[>[<tool_call>": _nested("]<]minimax[>[</tool_call>", "]<]minimax[>[")},
        ("]<]minimax[>[",),
        hints=("]<]minimax[>[",),
        writes=CallSyntax(
            f']<]minimax[>[<invoke name="{NAME}">',
            "]<]minimax[>[</invoke>\n",
            "",
            "]<]minimax[>[<tool_call>\n",
            "]<]minimax[>[</tool_call>",
        ),
    ),
    "functionary": Dialect(
        {">>>": _lines},
        hints=(">>>${recipient}", ">>>all\n"),
        writes=CallSyntax(f"{NAME}\n", "", ">>>", ">>>"),
    ),
    "kimi_k3": _all_in_tags(
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        _XTML,
        (
            "<|close|>think<|sep|>",
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|open|>",
            "<|close|>",
            "<|sep|>",
        ),
        ("<|open|>",),
        tool="tool",
        argument="key",
        kind=f' type="{TYPE}"',
        line="",
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
        writes=CallSyntax(
            f"<|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
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
        hints=("<｜tool▁calls▁begin｜>", "<|tool_calls_end|>"),
        writes=_DEEPSEEK,
        writes_with=("<|tool_call_begin|>", _DEEPSEEK.with_plain_bars()),
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
        writes=CallSyntax(
            f"<|tool_call:begin|>call00000<|tool_call:name|>{NAME}<|tool_call:args|>",
            "<|tool_call:end|>",
            "",
            "<|tool_calls|>",
            "<|calls|>",
        ),
    ),
    "mistral": Dialect(
        {"[TOOL_CALLS]": _header("")},
        ("[ARGS]", "[CALL_ID]"),
        writes=as_object("[TOOL_CALLS][", "]", ""),
        writes_with=("[ARGS]", CallSyntax(f"[TOOL_CALLS]{NAME}[ARGS]", "", "")),
    ),
    "granite": Dialect(
        {"<|tool_call|>": _objects("<|/tool_call|>")},
        ("<|/tool_call|>",),
        writes=listed("<|tool_call|>[", "]"),
    ),
    "apertus": Dialect(
        {"<|tools_prefix|>": _keyed("<|tools_suffix|>")},
        ("<|tools_suffix|>",),
        ends=("<|tools_suffix|>",),
        writes=CallSyntax(f'{{"{NAME}": ', "}", ", ", "<|tools_prefix|>[", "]<|tools_suffix|>"),
    ),
    "cohere": Dialect(
        {"<|START_ACTION|>": _objects("<|END_ACTION|>")},
        ("<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        writes=CallSyntax(
            f'{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": ',
            "}",
            ",\n",
            "<|START_ACTION|>[\n",
            "\n]<|END_ACTION|>",
        ),
    ),
    "command_r": Dialect(
        {"Action:\n```json": _objects("```"), "Action: ```json": _objects("```")},
        writes=listed("Action:\n```json\n[", "]```", "tool_name", "parameters"),
    ),
    "minimax_m1": Dialect(
        {"<tool_calls>": _objects("</tool_calls>")},
        ("</tool_calls>",),
        hints=("<tool_calls>\n{", "<tool_calls>\\n{"),
        writes=replace(as_object("", ""), begin="<tool_calls>\n", end="\n</tool_calls>"),
    ),
    "apriel": Dialect(
        {"<tool_calls>": _objects("</tool_calls>")},
        ("</tool_calls>", "[END FINAL RESPONSE]"),
        writes=listed("<tool_calls>[", "]</tool_calls>"),
    ),
    "nemotron": Dialect(
        {"<TOOLCALL>": _objects("</TOOLCALL>")},
        ("</TOOLCALL>",),
        writes=listed("<TOOLCALL>[", "]</TOOLCALL>"),
    ),
    "gigachat": Dialect(
        {"<|function_call|>": _objects("")},
        ("<|message_sep|>",),
        writes=as_object("<|function_call|>", "", ""),
    ),
    "gigachat_3": Dialect(
        {"<|message_sep|>\n\nfunction call<|role_sep|>": _objects("")},
        ("<|message_sep|>",),
        hints=("function call<|role_sep|>",),
        writes=as_object("<|message_sep|>\n\nfunction call<|role_sep|>\n", "", ""),
    ),
    "functools": Dialect(
        {"functools[": _objects("")},
        writes=listed("functools[", "]"),
    ),
    "gemma4": _in_fields(
        "<|tool_call>", "<tool_call|>", _GEMMA_4, ('<|"|>', "<|tool_response>"), ("<|tool_response>",)
    ),
    "function_gemma": _in_fields("<start_function_call>", "<end_function_call>", _FUNCTION_GEMMA, ("<escape>",)),
    "pythonic": Dialect(
        {"<|tool_call_start|>": _fields("<|tool_call_end|>", _PYTHON)},
        ("<|tool_call_end|>",),
        hints=("<|tool_list_start|>", "<|tool_call_start|>"),
        writes=as_fields("<|tool_call_start|>", "[", "(", ")]", "<|tool_call_end|>", FieldSyntax("=", ", ")),
    ),
    "functions": Dialect(
        {"<function=": _tagged("", replace(_XML, call=""))},
        ("</function>",),
        writes=CallSyntax(f"<function={NAME}>", "</function>"),
    ),
    "llama3": Dialect(
        {"<|python_tag|>": _objects("")},
        ("<|eom_id|>",),
        bare=True,
        hints=("<|python_tag|>", '"parameters": dictionary of argument name'),
        writes=as_object("", "", "; ", "parameters"),
    ),
}
DIALECTS["laguna"] = DIALECTS["glm47"]

NO_CALLS = Dialect({}, writes=CallSyntax("", ""))


def calling_format(form: ReplyFormat) -> ReplyFormat:
    """Return the format for a request with tools."""
    return form if form.dialect is not None else replace(form, dialect=_TOLD)


def call_syntax(form: ReplyFormat) -> CallSyntax:
    """Return a model's call syntax; not Harmony's, whose calls are messages."""
    dialect = DIALECTS[form.dialect or _TOLD]
    if dialect.writes_with is not None and any(token.name == dialect.writes_with[0] for token in form.tokens):
        return dialect.writes_with[1]
    return dialect.writes


def call_ends(form: ReplyFormat) -> tuple[str, ...]:
    return DIALECTS[form.dialect].ends if form.dialect in DIALECTS else ()


# A prompt may end with the first of a pair.
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
