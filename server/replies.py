"""How the reply to a request is read: one reader for a stream and for a whole answer, so that both say the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.models.text.replies.events import (
    Block,
    Event,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    blocks_of,
)
from agentcache.report import ModelInfo, Update
from agentcache.server.reply import Completion
from agentcache.server.tool_calls import ToolCallReader, Tools, tools_for
from agentcache.server.validate import Reader


@dataclass(frozen=True)
class Reading:
    """What to look for in a reply; without arguments, nothing: all of it is text."""

    tools: Tools = Tools()

    def reader(self) -> ReplyReader:
        """A reader for one stream."""
        return ReplyReader(self)

    def blocks(self, completion: Completion) -> list[Block]:
        """A whole answer."""
        reader = self.reader()
        return blocks_of(event for update in completion.updates for event in reader.add(update))


def read_reading(model: ModelInfo, tools: Sequence[Mapping[str, Any]] | None, body: Reader) -> Reading:
    """How the reply to the request `body` is read.

    Args:
        tools: those that the chat template shows, in OpenAI's shape; None for none.
    """
    return Reading(tools_for(model, tools, body))


class ReplyReader:
    """Takes the updates of one completion, each once and in order, and gives the events of what it says.

    The update with the `finish_reason` gives the last ones.

    Attributes:
        num_calls: calls begun so far.
    """

    def __init__(self, reading: Reading) -> None:
        self.num_calls = 0
        self._calls = ToolCallReader(reading.tools)

    def add(self, update: Update) -> list[Event]:
        parts = self._calls.add(update.text)
        if update.finish_reason is not None:
            parts += self._calls.finish()
        events: list[Event] = []
        for part in parts:
            if isinstance(part, str):
                events.append(TextDelta(part))
            else:
                index, self.num_calls = self.num_calls, self.num_calls + 1
                arguments = json.dumps(part.arguments, ensure_ascii=False)
                events += [ToolCallStart(index, part.name), ToolCallArguments(index, arguments), ToolCallEnd(index)]
        return events
