"""Detect a chat template's tool-call format (dialect) from a reply that it renders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentcache.api.model import ReplyFormat
from agentcache.text.json_values import parse_json, write_json
from agentcache.text.replies.calls import Tools
from agentcache.text.replies.dialects import DIALECTS
from agentcache.text.replies.events import Call, Text, blocks_of
from agentcache.text.replies.reader import open_reader

THOUGHT = "RIVERSTONE"
# They tell the dialects apart: a string with quotes, a number, a list in an object.
_ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("look_around", {"place": 'the "east" GARDEN', "count": 3, "deep": {"list": ["a", 1, True]}}),
    ("look_up", {"word": "CELLAR"}),
)
_MARKS = ("GARDEN", "CELLAR")  # one per call
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
    """Return an assistant message with sample calls; arguments are objects."""
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(_ARGUMENTS[:num_calls])
    ]
    return {"role": "assistant", **more, "tool_calls": calls}


def with_string_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Write the arguments as JSON text, for templates that need it."""
    calls = [
        call | {"function": call["function"] | {"arguments": write_json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@dataclass(frozen=True)
class WrittenReply:
    """A template's rendering of `call_message(num_calls)`, including the end of turn, after `prompt`."""

    prompt: str
    text: str
    num_calls: int

    @property
    def shows_calls(self) -> bool:
        return all(mark in self.text for mark in _MARKS[: self.num_calls])


def written_reply(prompt: str, whole: str, num_calls: int) -> WrittenReply:
    """Cut the reply out of the rendered conversation `whole`.

    Args:
        prompt: rendered text up to the generation prompt, which may have text that `whole` lacks.
    """
    begin = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    if begin < len(prompt):
        opened = whole.rfind("<", 0, begin)
        begin = begin if whole.rfind(">", 0, begin) >= opened else opened
    return WrittenReply(whole[:begin], whole[begin:], num_calls)


def find_dialect(written: WrittenReply, preferred: str | None) -> str | None:
    """Return the dialect that parses all calls of a rendered reply correctly, or None.

    Order: least text left, signs in the text, `preferred`, first.
    """
    left = {name: rest for name in DIALECTS if (rest := _left(name, written)) is not None}

    def order(name: str) -> tuple[int, bool, bool]:
        return left[name], not any(marker in written.text for marker in DIALECTS[name].signs), name != preferred

    return min(left, key=order, default=None)


def _left(name: str, written: WrittenReply) -> int | None:
    """Return how many characters are parsed as text; None if the calls are wrong."""
    reader = open_reader(ReplyFormat(name), _TOOLS, thoughts=False)
    reader.begin(written.prompt)
    blocks = blocks_of([*reader.add(written.text), *reader.finish(cut_off=False)])
    calls = tuple((block.name, parse_json(block.arguments)) for block in blocks if isinstance(block, Call))
    if calls != _ARGUMENTS[: written.num_calls]:
        return None
    return sum(len(block.text) for block in blocks if isinstance(block, Text))
