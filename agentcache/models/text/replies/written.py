"""A reply with calls as a chat template writes it, and which dialect reads it as what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentcache.models.text.json_values import parse_json, write_json
from agentcache.models.text.replies.calls import Tools
from agentcache.models.text.replies.dialects import DIALECTS
from agentcache.models.text.replies.events import Call, Text, blocks_of
from agentcache.models.text.replies.format import ReplyFormat
from agentcache.models.text.replies.reader import open_reader

THOUGHT = "RIVERSTONE"
# Arguments by which the dialects differ: a string with quotes, a number, a list in an object.
_ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("look_around", {"place": 'the "east" GARDEN', "count": 3, "deep": {"list": ["a", 1, True]}}),
    ("look_up", {"word": "CELLAR"}),
)
_MARKS = ("GARDEN", "CELLAR")  # of the calls, in their order
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
    """An assistant's message with calls, whose arguments are data."""
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(_ARGUMENTS[:num_calls])
    ]
    return {"role": "assistant", **more, "tool_calls": calls}


def with_string_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a template that wants arguments as JSON text."""
    calls = [
        call | {"function": call["function"] | {"arguments": write_json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@dataclass(frozen=True)
class WrittenReply:
    """What a template writes for `call_message(num_calls)`.

    Args:
        prompt: that it stands behind.
        text: up to the end of what the template writes: with what ends a turn.
    """

    prompt: str
    text: str
    num_calls: int

    @property
    def shows_calls(self) -> bool:
        return all(mark in self.text for mark in _MARKS[: self.num_calls])


def written_reply(prompt: str, whole: str, num_calls: int) -> WrittenReply:
    """A reply cut out of a conversation.

    Args:
        prompt: the conversation in front of it, with what begins a reply; a template may write more there than in the
            history, such as the beginning of a thought.
        whole: the conversation with the reply.
    """
    begin = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    if begin < len(prompt):
        opened = whole.rfind("<", 0, begin)
        begin = begin if whole.rfind(">", 0, begin) >= opened else opened
    return WrittenReply(whole[:begin], whole[begin:], num_calls)


def find_dialect(written: WrittenReply, preferred: str | None) -> str | None:
    """The dialect that reads all calls of a reply as they were told to the template; None for none.

    Of several it is that which leaves the least text, then one with markers in the text, then the preferred one.
    """
    left = {name: rest for name in DIALECTS if (rest := _left(name, written)) is not None}

    def order(name: str) -> tuple[int, bool, bool]:
        return left[name], not any(marker in written.text for marker in DIALECTS[name].signs), name != preferred

    return min(left, key=order, default=None)


def _left(name: str, written: WrittenReply) -> int | None:
    """Characters of a written reply that a dialect reads as text; None where it reads other calls than there are."""
    reader = open_reader(ReplyFormat(name), _TOOLS, thoughts=False)
    reader.begin(written.prompt)
    blocks = blocks_of([*reader.add(written.text), *reader.finish(cut_off=False)])
    calls = tuple((block.name, parse_json(block.arguments)) for block in blocks if isinstance(block, Call))
    if calls != _ARGUMENTS[: written.num_calls]:
        return None
    return sum(len(block.text) for block in blocks if isinstance(block, Text))
