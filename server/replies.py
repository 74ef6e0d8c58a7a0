"""How the reply to a request is read: one reader for a stream and for a whole answer, so that both say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentcache.answer_form import AnswerForm
from agentcache.models.text.grammars.call_syntax import calling_format
from agentcache.models.text.replies.calls import Tools
from agentcache.models.text.replies.events import Block, Event, ReasoningDelta, blocks_of
from agentcache.models.text.replies.reading import Reading
from agentcache.report import FinishReason, ModelInfo, Update
from agentcache.server.reply import Completion
from agentcache.server.thinking import AS_USUAL, Thinking
from agentcache.server.validate import Reader


def read_whole(reading: Reading, completion: Completion) -> tuple[list[Block], int]:
    """What a whole answer says, and how many of its tokens were thoughts."""
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
    """How the reply to the request `body` is read.

    With `agentcache.parse_tools` false calls are left in the text, with `agentcache.parse_reasoning` false thoughts.

    Args:
        tools: those that the chat template shows, in OpenAI's shape; None for none.
        form: that the answer must have.
        thinking: what the request says of thoughts.
    """
    extras = body.object("agentcache")
    reads_calls = bool(tools) and extras.boolean("parse_tools", True)
    reads_thoughts = extras.boolean("parse_reasoning", True) and thinking.parsed
    calls = bool(tools) or (form is not None and form.must_call)
    format = calling_format(model.reply_format) if calls else model.reply_format
    return Reading(format, Tools(tools or ()) if reads_calls else None, reads_thoughts, not thinking.shown)


class ReplyReader:
    """Takes the updates of one completion, each once and in order, and gives the events of what it says.

    The update with the `finish_reason` gives the last ones.

    Args:
        whole: whether the events are used only when all of them are known, not streamed.

    Attributes:
        reasoning_tokens: tokens that were thoughts, hidden or not, as far as updates tell them apart.
    """

    def __init__(self, reading: Reading, *, whole: bool = False) -> None:
        self._reader = reading.open(whole=whole)
        self._hides_thoughts = reading.hides_thoughts
        self.reasoning_tokens = 0

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
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
