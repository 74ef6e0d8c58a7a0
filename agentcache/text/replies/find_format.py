"""Detects a model's reply format from tokens, template and a rendered reply."""

from __future__ import annotations

import marshal
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentcache.api.model import HARMONY, HARMONY_MARKERS, MarkerToken, ReplyFormat
from agentcache.compat import TokenizerWrapper, renders_by_code, tool_format
from agentcache.errors import Overloaded
from agentcache.system.confined import ChildBroke, ConfinedWork, OverLimit, ReplyTooLong
from agentcache.text.json_values import parse_json, write_json
from agentcache.text.marks import NO_SEALS
from agentcache.text.replies.calls import Tools
from agentcache.text.replies.dialects import DIALECTS, THOUGHTS
from agentcache.text.replies.events import Call, Text, blocks_of
from agentcache.text.replies.reader import open_reader
from agentcache.text.template_child import RenderOutcome


def format_of(wrapper: TokenizerWrapper, added: Mapping[int, Any], eos_ids: Collection[int]) -> ReplyFormat:
    """Return a model's reply format. `added`: the tokenizer's added tokens by id."""
    templates = templates_of(wrapper)
    text = "\n".join(templates)
    tokens = {token.content: (i, token.special or i in eos_ids) for i, token in added.items()}
    written: list[WrittenReply] = []
    if "tool_calls" in text and not renders_by_code(wrapper):
        specials = tuple(sorted((name, str(token)) for name, token in wrapper.special_tokens_map.items()))
        written = [reply for template in templates for reply in write_replies(template, specials)]
    return find_format(text, tokens, tool_format(wrapper), written)


def templates_of(wrapper: TokenizerWrapper) -> list[str]:
    template = getattr(wrapper, "chat_template", None)
    templates = template.values() if isinstance(template, Mapping) else [template]
    return [each for each in templates if isinstance(each, str)]


def find_format(
    template: str,
    tokens: Mapping[str, tuple[int, bool]],
    mlx_lm_parser: str | None,
    written: Sequence[WrittenReply] = (),
) -> ReplyFormat:
    """Find the format from all templates' text, added tokens as (id, is special), and rendered calls."""
    all_text = "\n".join([template, *(reply.prompt + reply.text for reply in written)])
    if all(marker in tokens for marker in ("<|start|>", "<|channel|>", "<|message|>")):
        dialect: str | None = HARMONY
        thoughts: tuple[tuple[str, str], ...] = ()
    else:
        dialect = _find_dialect(template, tokens, mlx_lm_parser, written)
        thoughts = tuple(pair for pair in THOUGHTS if _has_pair(pair, all_text, tokens))
    markers = HARMONY_MARKERS if dialect == HARMONY else DIALECTS[dialect].markers if dialect is not None else ()
    single = [name for name in tokens if any(name in marker for marker in (*markers, *sum(thoughts, ())))]
    thinks_first = any(_only_closes(pair, all_text) for pair in thoughts)
    return ReplyFormat(
        dialect,
        thoughts,
        thinks_first,
        tuple(MarkerToken(name, tokens[name][0], is_shown=not tokens[name][1]) for name in single),
    )


def _has_pair(pair: tuple[str, str], text: str, tokens: Mapping[str, object]) -> bool:
    start, end = pair
    if all(marker in tokens or marker in text for marker in pair) or (end in text and _is_tag(pair)):
        return True
    return "<|channel>" in tokens and "<channel|>" in tokens and start == "<|channel>thought"


def _is_tag(pair: tuple[str, str]) -> bool:
    return pair[1].replace("/", "") == pair[0]


def _only_closes(pair: tuple[str, str], text: str) -> bool:
    # Only the closing marker: replies begin with reasoning.
    start, end = pair
    if end not in text or start in text or not _is_tag(pair):
        return False
    # A template that tests `end in reply` expects both markers.
    return re.search(rf"""["']{re.escape(end)}["']\s+in\b""", text) is None


def _find_dialect(
    template: str, tokens: Mapping[str, object], mlx_lm_parser: str | None, written: Sequence[WrittenReply]
) -> str | None:
    for reply in written:
        if reply.shows_calls and (found := find_dialect(reply, mlx_lm_parser)) is not None:
            return found
    if mlx_lm_parser in DIALECTS:
        return mlx_lm_parser
    told = [name for name, dialect in DIALECTS.items() if any(sign in template for sign in dialect.signs)]
    if told:
        return told[0]
    return next((name for name, dialect in DIALECTS.items() if any(sign in tokens for sign in dialect.signs)), None)


THOUGHT = "RIVERSTONE"
_ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("look_around", {"place": 'the "east" GARDEN', "count": 3, "deep": {"list": ["a", 1, True]}}),
    ("look_up", {"word": "CELLAR"}),
)
_MARKS = ("GARDEN", "CELLAR")
_PROPERTIES = {
    "place": {"type": "string", "description": "Where."},
    "count": {"type": "integer", "description": "How often."},
    "deep": {"type": "object", "description": "More.", "additionalProperties": {"type": "string"}},
    "word": {"type": "string", "description": "What."},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look.",
            "parameters": {
                "type": "object",
                "properties": {key: _PROPERTIES[key] for key in arguments},
                "required": [*arguments],
            },
        },
    }
    for name, arguments in _ARGUMENTS
]
_TOOLS = Tools(TOOLS)
USER: Mapping[str, Any] = {"role": "user", "content": "hello"}


def call_message(num_calls: int, **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(_ARGUMENTS[:num_calls])
    ]
    return {"role": "assistant", **more, "tool_calls": calls}


def with_string_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": write_json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@dataclass(frozen=True)
class WrittenReply:
    """A template's rendering of `call_message(num_calls)` after `prompt`, with end of turn."""

    prompt: str
    text: str
    num_calls: int

    @property
    def shows_calls(self) -> bool:
        return all(mark in self.text for mark in _MARKS[: self.num_calls])


def written_reply(prompt: str, whole: str, num_calls: int) -> WrittenReply:
    """Cut the reply out of `whole`, which may lack the generation prompt."""
    begin = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    if begin < len(prompt):
        opened = whole.rfind("<", 0, begin)
        begin = begin if whole.rfind(">", 0, begin) >= opened else opened
    return WrittenReply(whole[:begin], whole[begin:], num_calls)


def find_dialect(written: WrittenReply, preferred: str | None) -> str | None:
    """Return the dialect that parses all calls of a rendered reply.

    Of several: least text left, then signs in it, `preferred`, the first.
    """
    left = {name: rest for name in DIALECTS if (rest := _left(name, written)) is not None}

    def order(name: str) -> tuple[int, bool, bool]:
        return left[name], not any(marker in written.text for marker in DIALECTS[name].signs), name != preferred

    return min(left, key=order, default=None)


def _left(name: str, written: WrittenReply) -> int | None:
    reader = open_reader(ReplyFormat(name), _TOOLS, thoughts=False)
    reader.begin(written.prompt)
    blocks = blocks_of([*reader.add(written.text), *reader.finish(cut_off=False)])
    calls = tuple((block.name, parse_json(block.arguments)) for block in blocks if isinstance(block, Call))
    if calls != _ARGUMENTS[: written.num_calls]:
        return None
    return sum(len(block.text) for block in blocks if isinstance(block, Text))


_MAX_BYTES = 1 << 20
# Some templates demand these.
DEFAULTS = {"bos_token": "", "eos_token": "", "functions": "", "datetime": ""}
_THOUGHT = {"reasoning_content": THOUGHT, "thinking": THOUGHT, "reasoning": THOUGHT}
# Templates accept different samples.
_WAYS: tuple[dict[str, Any], ...] = (
    call_message(2, content="", **_THOUGHT),
    call_message(2, content=""),
    call_message(2, content=None),
    call_message(1, content=""),
    call_message(1, content=None),
    with_string_arguments(call_message(2, content="")),
)


@lru_cache(maxsize=64)
def write_replies(template: str, special_tokens: tuple[tuple[str, str], ...]) -> tuple[WrittenReply, ...]:
    """Return the first sample whose calls the template shows, else all accepted ones; none on a limit."""
    if "tool_calls" not in template:
        return ()
    work = ConfinedWork("agentcache.text.template_child")
    try:
        return write_in(work, template, {**DEFAULTS, **dict(special_tokens)})
    except (OverLimit, ReplyTooLong, ChildBroke, Overloaded):
        return ()
    finally:
        work.close()


def write_in(work: ConfinedWork, template: str, variables: Mapping[str, Any]) -> tuple[WrittenReply, ...]:
    prompt = render_in(work, template, variables, [USER], TOOLS, add_generation_prompt=True)
    if prompt is None:
        return ()
    replies: list[WrittenReply] = []
    for message in _WAYS:
        whole = render_in(work, template, variables, [USER, message], TOOLS, add_generation_prompt=False)
        if whole is None:
            continue
        replies.append(written_reply(prompt, whole, len(message["tool_calls"])))
        if replies[-1].shows_calls:
            return (replies[-1],)
    return tuple(replies)


def render_in(
    work: ConfinedWork,
    template: str,
    variables: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
) -> str | None:
    given = {
        **variables,
        "messages": [dict(message) for message in messages],
        "tools": list(tools),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    request = marshal.dumps((template, NO_SEALS, given, _MAX_BYTES))
    kind, content = work.ask([request], max_bytes=_MAX_BYTES)
    return content.decode("utf-8", "replace") if kind == RenderOutcome.TEXT else None
