"""Parses replies, streamed and whole in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentcache.api.answer_form import AnswerForm
from agentcache.api.model import ModelInfo
from agentcache.api.report import FinishReason, Update
from agentcache.api.request import Reading
from agentcache.server.reply import Completion
from agentcache.server.thinking import AS_USUAL, Thinking
from agentcache.server.validate import Reader
from agentcache.text.replies.dialects import calling_format
from agentcache.text.replies.events import Block, Event, ReasoningDelta, blocks_of
from agentcache.text.replies.reader import read_as


def read_whole(reading: Reading, completion: Completion) -> tuple[list[Block], int]:
    """Return the blocks, and the number of reasoning tokens."""
    reader = ReplyReader(reading, whole=True)
    blocks = blocks_of(event for update in completion.updates for event in reader.add(update))
    return blocks, reader.reasoning_tokens


def read_reading(
    model: ModelInfo,
    tools: Sequence[Mapping[str, Any]] | None,
    body: Reader,
    form: AnswerForm | None = None,
    thinking: Thinking = AS_USUAL,
) -> Reading:
    """Choose how to parse the reply.

    Args:
        tools: shown tools, in OpenAI's shape.
        form: demanded form.
    """
    extras = body.object("agentcache")
    reads_calls = bool(tools) and extras.boolean("parse_tools", True)
    reads_thoughts = extras.boolean("parse_reasoning", True) and thinking.parsed
    calls = bool(tools) or (form is not None and form.must_call)
    format = calling_format(model.reply_format) if calls else model.reply_format
    return Reading(format, tools or () if reads_calls else None, reads_thoughts, not thinking.shown)


class ReplyReader:
    """Parses the updates of one completion, in order.

    Args:
        whole: whether all updates are known, not streamed.

    Attributes:
        reasoning_tokens: as far as updates separate thoughts; includes hidden ones.
    """

    def __init__(self, reading: Reading, *, whole: bool = False) -> None:
        self._reader = read_as(reading, whole=whole)
        self._hides_thoughts = reading.hides_thoughts
        self.reasoning_tokens = 0

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    def add(self, update: Update) -> list[Event]:
        if update.prompt_end is not None:
            self._reader.begin(update.prompt_end)
        events = self._reader.add(update.text, update.markers)
        if update.finish_reason is not None:
            events += self._reader.finish(cut_off=update.finish_reason is FinishReason.LENGTH)
        if any(isinstance(event, ReasoningDelta) for event in events):
            self.reasoning_tokens += len(update.token_ids)
            if self._hides_thoughts:
                return [event for event in events if not isinstance(event, ReasoningDelta)]
        return events
