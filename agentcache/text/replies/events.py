"""Events of a reply, which HTTP dialects translate, and zones of its text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Start of a tool call. Calls do not overlap."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of a call's arguments, one JSON object."""

    index: int
    json: str


@dataclass(frozen=True)
class ToolCallEnd:
    """End of a tool call, also if cut off."""

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
    """A tool call; `arguments` is a JSON object's text."""

    name: str
    arguments: str


Block = Reasoning | Text | Call


def blocks_of(events: Iterable[Event]) -> list[Block]:
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


Zone = tuple[int, bool]
"""A number of characters of a reply's text, and whether they are said."""


class Zones:
    """Collects a reply's zones in order; `shown` decodes coded text (`Codes`)."""

    def __init__(self, shown: Callable[[str], str]) -> None:
        self._shown = shown
        self._zones: list[Zone] = []
        self._passed_over = 0

    def add(self, coded: str, *, is_said: bool) -> None:
        length = self._length(coded)
        over = min(length, self._passed_over)
        length, self._passed_over = length - over, self._passed_over - over
        if not length:
            return
        if self._zones and self._zones[-1][1] is is_said:
            length += self._zones.pop()[0]
        self._zones.append((length, is_said))

    def pass_over(self, coded: str) -> None:
        self._passed_over += self._length(coded)

    def _length(self, coded: str) -> int:
        return len(coded) if coded.isascii() else len(self._shown(coded))

    def take(self) -> list[Zone]:
        zones, self._zones = self._zones, []
        return zones
