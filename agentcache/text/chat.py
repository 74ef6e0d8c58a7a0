"""Renders chats to prompts, with the chat template's repairs."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentcache.api.model import ReplyFormat
from agentcache.errors import InvalidRequest
from agentcache.text.marks import Marks
from agentcache.text.messages import THOUGHT, plain_messages, with_short_ids, with_strings
from agentcache.text.repairs.find_repairs import find_repairs
from agentcache.text.repairs.kinds import NO_TEMPLATE, PLACEHOLDER, PLAINEST, Message, Repairs, Work, call_notation
from agentcache.text.repairs.steps import Render, rendered, repaired
from agentcache.text.template import REFUSED

_MOST_UNSEEN = 20
_HALF_PAIR = re.compile("[\ud800-\udfff]")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RenderedChat:
    """A prompt as marked text, with notes on changes to the client's messages."""

    text: str
    notes: tuple[str, ...] = ()


class ChatRenderer:
    """Renders chats with one template. Thread-safe.

    The first chat finds the repairs; they never change, so a conversation's prefix stays the same.

    Args:
        form: reply format, the notation of calls that become text.
    """

    def __init__(self, marks: Marks, form: ReplyFormat, has_template: bool) -> None:
        self._marks = marks
        self._notation = call_notation(form, marks.seals.seal)
        self._repairs: Repairs | None = None if has_template else NO_TEMPLATE
        self._lock = threading.Lock()

    @property
    def uses_template(self) -> bool:
        return self._repairs is not NO_TEMPLATE

    def repairs(self, probe: Render) -> tuple[str, ...] | None:
        """See `Tokenizer.template_repairs`."""
        found = self._found_repairs(probe)
        return None if found is NO_TEMPLATE else found.names

    def tell(
        self,
        render: Render,
        probe: Render,
        render_without: Callable[[Sequence[Message]], str],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = True,
    ) -> RenderedChat:
        """Return the prompt of a chat.

        Args:
            render, probe: template with and without the request's variables.
            render_without: substitute for a missing template.
            add_generation_prompt: whether a reply follows; if not, a final placeholder is cut off.

        Raises:
            As `render`; InvalidRequest with code `REFUSED` if every form of the chat is refused.
        """
        notes: list[str] = []

        def mark(text: str) -> str:
            if _HALF_PAIR.search(text):
                notes.append("messages: half of a surrogate pair is no character and was replaced by U+FFFD")
                text = _HALF_PAIR.sub("\ufffd", text)
            return self._marks.mark(text)

        marked = with_strings(plain_messages(messages, notes.append), mark)
        marked_tools = with_strings(tools, mark)
        repairs = self._found_repairs(probe)
        if repairs is NO_TEMPLATE:
            told = repaired(marked, marked_tools, repairs, self._notation)
            return _rendered(
                self._marks.unsealed(render_without(told.messages).encode("utf-8", "surrogatepass")), notes, told
            )
        refusal: InvalidRequest | None = None
        for told in self._ways(marked, marked_tools, repairs):
            try:
                text = rendered(told, render)
                if told.ends_with_placeholder and not add_generation_prompt:
                    text = text[: text.rfind(PLACEHOLDER)]
                return _rendered(text, notes, told)
            except InvalidRequest as error:
                if error.code != REFUSED:
                    raise
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _ways(self, messages: list[Message], tools: list[Message] | None, repairs: Repairs) -> Iterator[Work]:
        # Least change first. New call ids may change cached prompts.
        yield repaired(messages, tools, repairs, self._notation)
        fewer = [_with_one_comment(message) for message in messages]
        tried = [messages]
        for way in (with_short_ids(messages), fewer, with_short_ids(fewer)):
            if way not in tried:
                tried.append(way)
                yield repaired(way, tools, repairs, self._notation)
        if tools:  # the template may refuse a tool's schema
            yield repaired(with_short_ids(fewer), tools, repairs.with_("tools_as_text"), self._notation)
        plainest = replace(PLAINEST, empty_tools=repairs.empty_tools, thoughts=repairs.thoughts)
        yield repaired(with_short_ids(fewer), tools, plainest, self._notation)

    def _found_repairs(self, probe: Render) -> Repairs:
        with self._lock:
            if self._repairs is None:
                self._repairs = find_repairs(probe, self._notation)
                if self._repairs is NO_TEMPLATE:
                    log.warning("the model's chat template refuses every conversation; chats are served without it")
            return self._repairs


def _rendered(text: str, notes: Sequence[str], told: Work) -> RenderedChat:
    return RenderedChat(text, tuple(dict.fromkeys([*notes, *told.notes, *_unseen_tools(text, told.tools)])))


def _unseen_tools(text: str, tools: Sequence[Message] | None) -> Iterator[str]:
    functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, Mapping)]
    unseen, at = list[str](), 0
    for name in (str(each.get("name")) for each in functions if isinstance(each, Mapping)):
        # Templates keep the order of tools: one pass finds all names.
        found = text.find(name, at)
        found = text.find(name) if found < 0 else found
        if found < 0:
            unseen.append(name)
            if len(unseen) == _MOST_UNSEEN:
                break
        else:
            at = found
    if unseen:
        yield f"tools: the model's chat template does not show {', '.join(unseen)[:200]}; the model does not see them"


def _with_one_comment(message: Message) -> Message:
    # Some templates refuse a thought beside text and call.
    if not (message.get("content") and message.get("tool_calls")):
        return message
    return {key: value for key, value in message.items() if key != THOUGHT}
