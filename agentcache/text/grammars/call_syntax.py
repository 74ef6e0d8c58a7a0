"""Call syntax of each dialect for grammars. It must match the parsers in `replies`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from keyword import iskeyword

from agentcache.text.replies.format import HARMONY, ReplyFormat

_NAME = "NAME"
_TYPE = "TYPE"
_IS_STRING = "IS_STRING"  # true or false
_WORD = re.compile("[A-Za-z0-9_]{1,100}")
_MARKER = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
_WORDS = re.compile(r"[A-Za-z0-9_\-]+")

# Of models without a dialect; `repairs/notation.py` shows it in the prompt.
_TOLD = "json_tools"


@dataclass(frozen=True)
class ArgumentSyntax:
    """Syntax of a tagged argument. Line breaks are allowed between the parts.

    Args:
        name_open, name_close: text around the name, with the placeholders `TYPE` and `IS_STRING`.
        close: text whose first occurrence ends the value.
        on_lines: put the value on separate lines; else white space around it is not part of it.
    """

    name_open: str
    name_close: str
    close: str
    value_open: str = ""
    on_lines: bool = False

    @property
    def says_type(self) -> bool:
        return _TYPE in self.name_close or _IS_STRING in self.name_close

    def name_closed(self, type_: str) -> str:
        closed = self.name_close.replace(_IS_STRING, "true" if type_ == "string" else "false")
        return closed.replace(_TYPE, "number" if type_ == "integer" else type_)


@dataclass(frozen=True)
class FieldSyntax:
    """Syntax of arguments as `name value` fields.

    Args:
        quote: quote of unescaped strings; lists and objects then use the same syntax in `[…]` and `{…}`. If empty,
            values are JSON and names are Python identifiers.
    """

    assign: str
    comma: str
    quote: str = ""

    def can_name(self, name: str) -> bool:
        return _WORD.fullmatch(name) is not None if self.quote else _is_python(name)

    def can_call(self, name: str) -> bool:
        return _WORDS.fullmatch(name) is not None if self.quote else all(map(_is_python, name.split(".")))


def _is_python(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not iskeyword(name)


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of calls.

    Args:
        open, close: text around a call's arguments, with the placeholder `NAME`.
        begin, between, end: text around and between all calls.
        argument, fields: syntax of the arguments; JSON without either.
        as_json: syntax of a call with JSON arguments; None if only the arguments differ.
    """

    open: str
    close: str
    between: str = "\n"
    begin: str = ""
    end: str = ""
    argument: ArgumentSyntax | None = None
    fields: FieldSyntax | None = None
    as_json: CallSyntax | None = None

    @property
    def is_bare(self) -> bool:
        """Whether calls are JSON without a marker."""
        return not self.begin and self.open.startswith("{")

    @property
    def marker(self) -> str:
        found = _MARKER.match(f"{self.begin}{self.open}")
        return found[0] if found else ""

    def behind(self, marker: str) -> CallSyntax:
        return replace(self, begin=marker)

    def opened(self, name: str) -> str:
        return self.open.replace(_NAME, name)


def _as_object(before: str, after: str, between: str = "\n", arguments: str = "arguments") -> CallSyntax:
    return CallSyntax(f'{before}{{"name": "{_NAME}", "{arguments}": ', "}" + after, between)


def _as_fields(begin: str, call: str, opening: str, closing: str, end: str, fields: FieldSyntax) -> CallSyntax:
    as_json = _as_object(begin, end, "")
    return CallSyntax(f"{begin}{call}{_NAME}{opening}", f"{closing}{end}", "", fields=fields, as_json=as_json)


_MISTRAL_LIST = _as_object("[TOOL_CALLS][", "]", "")
_DEEPSEEK = CallSyntax(
    f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)


def _dsml(section: str) -> CallSyntax:
    """DeepSeek V3.2 and V4."""
    return CallSyntax(
        f'<｜DSML｜invoke name="{_NAME}">\n',
        "</｜DSML｜invoke>\n",
        "",
        f"<｜DSML｜{section}>\n",
        f"</｜DSML｜{section}>",
        ArgumentSyntax('<｜DSML｜parameter name="', f'" string="{_IS_STRING}">', "</｜DSML｜parameter>"),
    )


def _listed(before: str, after: str, name_key: str = "name", arguments: str = "arguments") -> CallSyntax:
    return CallSyntax(f'{{"{name_key}": "{_NAME}", "{arguments}": ', "}", ", ", before, after)


_KEYS = ArgumentSyntax("<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>")

_SYNTAX: dict[str, CallSyntax] = {
    "json_tools": _as_object("<tool_call>\n", "\n</tool_call>"),
    "qwen3_coder": CallSyntax(
        f"<tool_call>\n<function={_NAME}>\n",
        "</function>\n</tool_call>",
        argument=ArgumentSyntax("<parameter=", ">", "</parameter>", on_lines=True),
    ),
    "functions": CallSyntax(f"<function={_NAME}>", "</function>"),
    "glm47": CallSyntax(f"<tool_call>{_NAME}\n", "</tool_call>", argument=_KEYS),
    "laguna": CallSyntax(f"<tool_call>{_NAME}\n", "</tool_call>", argument=_KEYS),
    "longcat": CallSyntax(
        f"<longcat_tool_call>{_NAME}\n",
        "</longcat_tool_call>",
        argument=ArgumentSyntax(
            "<longcat_arg_key>", "</longcat_arg_key>", "</longcat_arg_value>", "<longcat_arg_value>"
        ),
    ),
    "minimax_m2": CallSyntax(
        f'<invoke name="{_NAME}">\n',
        "</invoke>\n",
        "",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
        ArgumentSyntax('<parameter name="', '">', "</parameter>"),
    ),
    "minimax_m3": CallSyntax(
        f']<]minimax[>[<invoke name="{_NAME}">',
        "]<]minimax[>[</invoke>\n",
        "",
        "]<]minimax[>[<tool_call>\n",
        "]<]minimax[>[</tool_call>",
    ),
    "functionary": CallSyntax(f"{_NAME}\n", "", ">>>", ">>>"),
    "minicpm5": CallSyntax(
        f'<function name="{_NAME}">', "</function>", argument=ArgumentSyntax('<param name="', '">', "</param>")
    ),
    "muse_spark": CallSyntax(
        f'<atem:invoke name="{_NAME}">\n',
        "</atem:invoke>\n",
        "",
        "<atem:function_calls>\n",
        "</atem:function_calls>",
        ArgumentSyntax('<atem:parameter name="', '">', "</atem:parameter>"),
    ),
    "kimi_k3": CallSyntax(
        f'<|open|>call tool="{_NAME}"<|sep|>',
        "<|close|>call<|sep|>",
        "",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        ArgumentSyntax(
            '<|open|>argument key="',
            f'" type="{_TYPE}"<|sep|>',
            "<|close|>argument<|sep|>",
        ),
    ),
    "kimi_k2": CallSyntax(
        f"<|tool_call_begin|>functions.{_NAME}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek": _DEEPSEEK,
    "mistral": CallSyntax(f"[TOOL_CALLS]{_NAME}[ARGS]", "", ""),
    "granite": _listed("<|tool_call|>[", "]"),
    "apertus": CallSyntax(f'{{"{_NAME}": ', "}", ", ", "<|tools_prefix|>[", "]<|tools_suffix|>"),
    "cohere": CallSyntax(
        f'{{"tool_call_id": "0", "tool_name": "{_NAME}", "parameters": ',
        "}",
        ",\n",
        "<|START_ACTION|>[\n",
        "\n]<|END_ACTION|>",
    ),
    "command_r": _listed("Action:\n```json\n[", "]```", "tool_name", "parameters"),
    "minimax_m1": replace(_as_object("", ""), begin="<tool_calls>\n", end="\n</tool_calls>"),
    "apriel": _listed("<tool_calls>[", "]</tool_calls>"),
    "nemotron": _listed("<TOOLCALL>[", "]</TOOLCALL>"),
    "gigachat": _as_object("<|function_call|>", "", ""),
    "gigachat_3": _as_object("<|message_sep|>\n\nfunction call<|role_sep|>\n", "", ""),
    "functools": _listed("functools[", "]"),
    "solar": CallSyntax(
        f"<|tool_call:begin|>call00000<|tool_call:name|>{_NAME}<|tool_call:args|>",
        "<|tool_call:end|>",
        "",
        "<|tool_calls|>",
        "<|calls|>",
    ),
    "seed_oss": CallSyntax(
        f"<seed:tool_call>\n<function={_NAME}>\n",
        "</function>\n</seed:tool_call>",
        argument=ArgumentSyntax("<parameter=", ">", "</parameter>"),
    ),
    "hunyuan": CallSyntax(
        f"<tool_call:opensource>{_NAME}<tool_sep:opensource>\n",
        "</tool_call:opensource>\n",
        "",
        "<tool_calls:opensource>\n",
        "</tool_calls:opensource>",
        ArgumentSyntax(
            "<arg_key:opensource>", "</arg_key:opensource>", "</arg_value:opensource>", "<arg_value:opensource>"
        ),
    ),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v32": _dsml("function_calls"),
    "llama3": _as_object("", "", "; ", "parameters"),
    "gemma4": _as_fields("<|tool_call>", "call:", "{", "}", "<tool_call|>", FieldSyntax(":", ",", '<|"|>')),
    "function_gemma": _as_fields(
        "<start_function_call>", "call:", "{", "}", "<end_function_call>", FieldSyntax(":", ",", "<escape>")
    ),
    "pythonic": _as_fields("<|tool_call_start|>", "[", "(", ")]", "<|tool_call_end|>", FieldSyntax("=", ", ")),
}


def calling_format(form: ReplyFormat) -> ReplyFormat:
    """Return the format for a request with tools: `json_tools` without a dialect."""
    return form if form.dialect is not None else replace(form, dialect=_TOLD)


def call_syntax(form: ReplyFormat) -> CallSyntax:
    """Return a model's call syntax. `form` must not be Harmony, whose calls are messages."""
    dialect, tokens = form.dialect or _TOLD, {token.name for token in form.tokens}
    assert dialect != HARMONY
    if dialect == "mistral" and "[ARGS]" not in tokens:
        return _MISTRAL_LIST
    if dialect == "deepseek" and "<|tool_call_begin|>" in tokens:
        return _with_plain_bars(_DEEPSEEK)
    return _SYNTAX[dialect]


def _with_plain_bars(syntax: CallSyntax) -> CallSyntax:
    """Use the ASCII markers of some conversions of DeepSeek models."""
    plain = str.maketrans("｜▁", "|_")
    return CallSyntax(
        syntax.open.translate(plain),
        syntax.close.translate(plain),
        syntax.between,
        syntax.begin.translate(plain),
        syntax.end.translate(plain),
    )
