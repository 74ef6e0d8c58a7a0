"""Events of a streamed reply, which each HTTP dialect translates, and their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """A piece of answer text."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Start of a tool call. Calls do not overlap; `index` counts from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of a call's arguments; together, the JSON text of one object."""

    index: int
    json: str


@dataclass(frozen=True)
class ToolCallEnd:
    """End of a tool call. Every start gets one, even in a cut-off reply."""

    index: int


Event = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


Block = Reasoning | Text | Call


def blocks_of(events: Iterable[Event]) -> list[Block]:
    """Combine a reply's events into blocks."""
    blocks: list[Block] = []
    for event in events:
        last = blocks[-1] if blocks else None
        match event:
            case ReasoningDelta(text):
                _grow(blocks, Reasoning((last.text if isinstance(last, Reasoning) else "") + text))
            case TextDelta(text):
                _grow(blocks, Text((last.text if isinstance(last, Text) else "") + text))
            case ToolCallStart(_, name):
                blocks.append(Call(name, ""))
            case ToolCallArguments(_, json):
                assert isinstance(last, Call)
                blocks[-1] = Call(last.name, last.arguments + json)
    return blocks


def _grow(blocks: list[Block], block: Block) -> None:
    if blocks and type(blocks[-1]) is type(block):
        blocks[-1] = block
    else:
        blocks.append(block)
