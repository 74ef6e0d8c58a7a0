"""A reply as it is read: the events that every wire dialect translates, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningDelta:
    """A further piece of what the model thinks."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """A further piece of what it says."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; its arguments follow. Calls do not overlap, and `index` counts them from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A further piece of the JSON text of the call's arguments. All pieces of a call together are one JSON object."""

    index: int
    json: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The call's arguments are complete: every start is followed by its end, also where the answer was cut off."""

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
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


Block = Reasoning | Text | Call


def blocks_of(events: Iterable[Event]) -> list[Block]:
    """The blocks of a reply in their order, as the events of a stream add up to them."""
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
