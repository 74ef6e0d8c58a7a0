"""Families of reply formats: their markers as tokens, their templates, and replies with what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentcache.text.replies.events import Block, Call, Reasoning, Text
from tests.text.templates import QWEN_3
from tests.tokenizers_factory import with_markers

_TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _saying(markers: str) -> str:
    """A template that tells of a dialect: what is in a comment is in its text."""
    return _TURNS + "{% if false %}" + markers + "{% endif %}"


DEEPSEEK = """{{ '<｜begin▁of▁sentence｜>' }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}{{ '<｜Assistant｜></think>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first }}{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments | tojson }}{{ '<｜tool▁call▁end｜>' }}{{ '<｜tool▁calls▁end｜>' if loop.last }}
{%- endfor %}{{ '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>' }}{% endif %}"""

HARMONY = """{{ '<|start|>system<|message|>Reasoning: low<|end|>' }}
{%- set ns = namespace(last_user=-1, tool='') %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- if message.thinking and loop.index0 > ns.last_user %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{%- set ns.tool = message.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.tool + '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A tokenizer and template, and replies: what is generated behind the prompt, and what it says.

    Args:
        special: markers that are special tokens, which text hides.
        plain: markers that are tokens like any added one.
    """

    template: str
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    eos: str = "<|im_end|>"
    replies: tuple[tuple[str, tuple[Block, ...]], ...] = ()

    def write(self, folder: Path) -> Path:
        return with_markers(folder, self.template, self.special, self.plain, self.eos)


_SKY = '{"at": "sky — 日本 🙂", "n": 2}'
_CALL = f'{{"name": "look", "arguments": {_SKY}}}'
_LOOK, _NOW = Call("look", _SKY), Call("now", "{}")
_THINK = ("<think>", "</think>")
_TAGS = "<function=look>\n<parameter=at>\nsky — 日本 🙂\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>"
_KEYS = "<arg_key>at</arg_key>\n<arg_value>sky — 日本 🙂</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n"
_HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_DEEPSEEK_TOOLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)

FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        QWEN_3,
        plain=(*_THINK, "<tool_call>", "</tool_call>"),
        replies=(
            ("<think>\nhm — 日\n</think>\n\nSo.", (Reasoning("hm — 日"), Text("So."))),
            (
                f"<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{_CALL}\n</tool_call>\n"
                f'<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
                (Reasoning("hm"), Text("Let me see."), _LOOK, _NOW),
            ),
            ("<think>\nnever closed, not to the end\n", (Reasoning("never closed, not to the end"),)),
            ("Plain. \n\n  Text  with\tspace\n", (Text("Plain. \n\n  Text  with\tspace\n"),)),
            ('<tool_call>{"name": "look", "arguments": {"at": "the s', (Call("look", '{"at": "the s"}'),)),
            ('<tool_call>{"name": "lo', (Text('{"name": "lo'),)),
            ("<tool_call>nothing</tool_call> more", (Text("nothing more"),)),
            (f"<think>forgot to close <tool_call>{_CALL}</tool_call>", (Reasoning("forgot to close"), _LOOK)),
            (f"<tool_call>{_CALL[:-2]}, }}\n", (_LOOK,)),
        ),
    ),
    "hermes, markers in pieces": Family(
        _saying("<tool_call>"),
        replies=(
            (f"Well <tool_call>\n{_CALL}\n</tool_call>", (Text("Well"), _LOOK)),
            (f'<tool_call>{{"arguments": {_SKY}, "name": "look"}}</tool_call>', (_LOOK,)),
            ("a < b and <tool is not", (Text("a < b and <tool is not"),)),
        ),
    ),
    "qwen3 coder": Family(
        _saying("<tool_call>\n<function="),
        plain=("<tool_call>", "</tool_call>"),
        replies=(
            (f"Ok.\n<tool_call>\n{_TAGS}\n</tool_call>", (Text("Ok."), _LOOK)),
            (f"{_TAGS}\n</tool_call>", (_LOOK,)),
            ("<tool_call>\n<function=look>\n<parameter=at>\nif a <", (Call("look", '{"at": "if a "}'),)),
        ),
    ),
    "bare function": Family(
        _saying("<function=example_name>"), replies=((f"So <function=look>{_SKY}</function>", (Text("So"), _LOOK)),)
    ),
    "glm": Family(
        _saying("<tool_call><arg_key></think><think>"),
        plain=(*_THINK, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        replies=(
            (
                f"<think>hm</think>Yes\n<tool_call>look\n{_KEYS}</tool_call>\n<tool_call>now</tool_call>",
                (Reasoning("hm"), Text("Yes"), _LOOK, _NOW),
            ),
        ),
    ),
    "minimax": Family(
        _saying("<minimax:tool_call><think></think>"),
        plain=(*_THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        replies=(
            (
                '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">sky — 日本 🙂</parameter>\n'
                '<parameter name="n">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
                (_LOOK, _NOW),
            ),
        ),
    ),
    "deepseek": Family(
        DEEPSEEK,
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        plain=(*_THINK, *_DEEPSEEK_TOOLS, "<｜User｜>", "<｜Assistant｜>"),
        eos="<｜end▁of▁sentence｜>",
        replies=(
            ("hm — 日</think>So.", (Reasoning("hm — 日"), Text("So."))),
            (
                f"hm</think>Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{_SKY}<｜tool▁call▁end｜>"
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                (Reasoning("hm"), Text("Ok."), _LOOK, _NOW),
            ),
            ("hm, cut", (Reasoning("hm, cut"),)),
        ),
    ),
    "closing marker only": Family(
        _TURNS + "{% if false %}{{ messages[0].content.split('</think>')[-1] }}{% endif %}",
        plain=_THINK,
        replies=(
            ("hm\n</think>\n\nSo.", (Reasoning("hm"), Text("So."))),
            ("<think>\nhm\n</think>\n\nSo.", (Reasoning("hm"), Text("So."))),
        ),
    ),
    "kimi": Family(
        _saying("<|tool_calls_section_begin|>"),
        special=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
        replies=(
            (
                f"Ok<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{_SKY}"
                "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
                "<|tool_calls_section_end|>",
                (Text("Ok"), _LOOK, _NOW),
            ),
        ),
    ),
    "mistral": Family(
        _saying("[TOOL_CALLS][THINK][/THINK]"),
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        replies=(
            (
                f"[THINK]hm[/THINK]Ok[TOOL_CALLS]look[ARGS]{_SKY}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}",
                (Reasoning("hm"), Text("Ok"), _LOOK, _NOW),
            ),
            (f"[TOOL_CALLS][{_CALL}]", (_LOOK,)),
            ("Ok [TOOL_CALLS]and no call", (Text("Ok and no call"),)),
        ),
    ),
    "llama": Family(
        _saying('"parameters": dictionary of argument name'),
        special=("<|python_tag|>", "<|eom_id|>"),
        replies=(
            (f'{{"name": "look", "parameters": {_SKY}}}; {{"name": "now", "parameters": {{}}}}', (_LOOK, _NOW)),
            (f'<|python_tag|>{{"type": "function", "name": "look", "parameters": {_SKY}}}', (_LOOK,)),
            ('{"answer": [1, 2]}', (Text('{"answer": [1, 2]}'),)),
            ('{"name": "nobody", "parameters": {}}', (Text('{"name": "nobody", "parameters": {}}'),)),
        ),
    ),
    "granite": Family(
        _saying("<|tool_call|>"), special=("<|tool_call|>",), replies=((f"<|tool_call|>[{_CALL}]", (_LOOK,)),)
    ),
    "gemma": Family(
        _saying("<|tool_call><tool_call|>"),
        special=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        replies=(
            (
                '<|channel>thought\nhm<channel|>Ok<|tool_call>call:look{at:<|"|>sky — 日本 🙂<|"|>,n:2}<tool_call|>',
                (Reasoning("hm"), Text("Ok"), _LOOK),
            ),
            ('<|tool_call>call:look{at:<|"|>the s', (Call("look", '{"at": "the s"}'),)),
            (f"<|tool_call>{_CALL}<tool_call|>", (_LOOK,)),
            ("<|tool_call>call: nothing<tool_call|> more", (Text("call: nothing more"),)),
        ),
    ),
    "function gemma": Family(
        _saying("<start_function_call>"),
        special=("<start_function_call>", "<end_function_call>", "<escape>"),
        replies=(
            (
                "Ok<start_function_call>call:look{at:<escape>sky — 日本 🙂<escape>,n:2}<end_function_call>"
                "<start_function_call>call:now{}<end_function_call>",
                (Text("Ok"), _LOOK, _NOW),
            ),
            (
                "<start_function_call>call:look{at:<escape>{a}, b:<escape>}<end_function_call>",
                (Call("look", '{"at": "{a}, b:"}'),),
            ),
            ("<start_function_call>call:look{at:sky,n:2}<end_function_call>", (Call("look", '{"at": "sky", "n": 2}'),)),
        ),
    ),
    "lfm": Family(
        _saying("<|tool_list_start|>"),
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
        replies=(
            (
                '<|tool_call_start|>[look(at="sky — 日本 🙂", n=2), now()]<|tool_call_end|>Ok',
                (_LOOK, _NOW, Text("Ok")),
            ),
            ("<|tool_call_start|>[look(at='the s', n=2", (Call("look", '{"at": "the s"}'),)),
            ("<|tool_call_start|>look(at='the s", (Call("look", '{"at": "the s"}'),)),
            (f"<|tool_call_start|>{_CALL}<|tool_call_end|>", (_LOOK,)),
            ("<|tool_call_start|>[nothing]<|tool_call_end|> more", (Text("[nothing] more"),)),
        ),
    ),
    "longcat": Family(
        _saying("<longcat_tool_call>"),
        replies=(
            (
                f"<longcat_tool_call>look\n{_KEYS.replace('arg_', 'longcat_arg_')}</longcat_tool_call>",
                (_LOOK,),
            ),
        ),
    ),
    "harmony": Family(
        HARMONY,
        special=_HARMONY_MARKERS,
        eos="<|return|>",
        replies=(
            (
                "<|channel|>analysis<|message|>hm — 日<|end|><|start|>assistant<|channel|>final<|message|>So. ",
                (Reasoning("hm — 日"), Text("So. ")),
            ),
            (
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
                "<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>" + _SKY,
                (Reasoning("hm"), Text("Wait."), _LOOK),
            ),
            ("<|channel|>commentary to=functions.now<|message|>{}", (_NOW,)),
            (" to=functions.look<|channel|>commentary json<|message|>" + _SKY, (_LOOK,)),
            ("<|channel|>analysis to=functions.look code<|message|>" + _SKY[:12], (Call("look", '{"at": "sky "}'),)),
            ("no message at all", (Text("no message at all"),)),
            ("<|channel|>analysis<|message|>cut", (Reasoning("cut"),)),
        ),
    ),
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string"}, "n": {"type": "integer"}},
                "required": ["at"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]

WRITERS: dict[str, Callable[[Path], Any]] = {name: partial(Family.write, family) for name, family in FAMILIES.items()}
