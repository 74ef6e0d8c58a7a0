"""Renders chats to prompts, with the chat template's repairs."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentcache.api.model import ReplyFormat
from agentcache.errors import ContextLengthExceeded, InvalidRequest
from agentcache.text.encoder import MarkedEncoder, TextStart, check_characters
from agentcache.text.marks import Marks
from agentcache.text.messages import THOUGHT, plain_messages, with_short_ids, with_strings
from agentcache.text.repairs.kinds import NO_TEMPLATE, PLACEHOLDER, PLAINEST, Message, Repairs, Work, call_notation
from agentcache.text.repairs.steps import Render, find_repairs, rendered, repaired
from agentcache.text.template import MAX_BYTES, REFUSED, ChatTemplate, RenderedTooLong, check_kwargs
from agentcache.text.work_limit import UNLIMITED, WorkLimit

_MOST_UNSEEN = 20
_PROBE_BYTES = 1 << 16
_UTF8_BYTES = 4  # per character
_HALF_PAIR = re.compile("[\ud800-\udfff]")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RenderedChat:
    """A prompt as marked text, and notes on changed messages."""

    text: str
    notes: tuple[str, ...] = ()


class ChatRenderer:
    """Renders chats with a model's template, whose repairs never change. Thread-safe."""

    def __init__(
        self, template: ChatTemplate, marks: Marks, encoder: MarkedEncoder, start: TextStart, form: ReplyFormat
    ) -> None:
        self._template = template
        self._marks = marks
        self._encoder = encoder
        self._start = start
        self._notation = call_notation(form, marks.seals.seal)
        self._repairs: Repairs | None = None if template.exists else NO_TEMPLATE
        self._lock = threading.Lock()

    @property
    def has_template(self) -> bool:
        return self._template.exists

    @property
    def uses_template(self) -> bool:
        """Whether a template exists that has not refused every chat."""
        return self._repairs is not NO_TEMPLATE

    def repairs(self) -> tuple[str, ...] | None:
        """Return the template's repairs by name; None if unused. Raises UnsupportedModel for its syntax error."""
        found = self._find_repairs(UNLIMITED)
        return None if found is NO_TEMPLATE else found.names

    def start(self) -> None:
        if self.uses_template:
            self._template.start()
            self.text([{"role": "user", "content": "hello"}])

    def close(self) -> None:
        self._template.close()

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        return self.render(messages, tools, add_generation_prompt).text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        limit: WorkLimit = UNLIMITED,
    ) -> RenderedChat:
        """Render a chat as marked text.

        Raises InvalidRequest (refused by the template or a limit) and ContextLengthExceeded.
        """
        check_kwargs(template_kwargs or {})
        notes: list[str] = []

        def mark(text: str) -> str:
            if _HALF_PAIR.search(text):
                notes.append("messages: half of a surrogate pair was replaced by U+FFFD")
                text = _HALF_PAIR.sub("\ufffd", text)
            return self._marks.mark(text)

        try:
            render = partial(
                self._render,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=with_strings(template_kwargs or {}, self._marks.mark),
                limit=limit,
            )
            marked = with_strings(plain_messages(messages, notes.append), mark)
            repairs = self._find_repairs(limit)
            text, told = self._render_repaired(
                render, repairs, marked, with_strings(tools, mark), add_generation_prompt
            )
        except RecursionError as error:
            raise InvalidRequest("The messages or tools are nested too deeply.", param="messages") from error
        check_characters(text, "messages")
        return RenderedChat(text, tuple(dict.fromkeys([*notes, *told.notes, *_unseen_tools(text, told.tools)])))

    def _render_repaired(
        self,
        render: Render,
        repairs: Repairs,
        messages: list[Message],
        tools: list[Message] | None,
        add_generation_prompt: bool,
    ) -> tuple[str, Work]:
        if repairs is NO_TEMPLATE:
            told = repaired(messages, tools, repairs, self._notation)
            lines = "".join(f"{message['role']}: {message['content']}\n" for message in told.messages)
            text = self._start.prompt(lines + ("assistant:" if add_generation_prompt else ""))
            return self._marks.unsealed(text.encode("utf-8", "surrogatepass")), told
        refusal: InvalidRequest | None = None
        for told in self._ways(messages, tools, repairs):
            try:
                text = rendered(told, render)
            except InvalidRequest as error:
                if error.code != REFUSED:
                    raise
                refusal = refusal or error
                continue
            is_cut = told.ends_with_placeholder and not add_generation_prompt
            return text[: text.rfind(PLACEHOLDER)] if is_cut else text, told
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

    def _find_repairs(self, limit: WorkLimit) -> Repairs:
        with self._lock:
            if self._repairs is None:
                self._repairs = find_repairs(partial(self._probe, limit), self._notation)
                if self._repairs is NO_TEMPLATE:
                    log.warning("the model's chat template refuses every conversation; chats are served without it")
            return self._repairs

    def _probe(self, limit: WorkLimit, messages: Any, tools: Any, variables: Mapping[str, Any]) -> str:
        work = WorkLimit(has_ended=limit.has_ended)
        if self._template.is_greedy(tools, work):
            raise InvalidRequest(
                "the model's chat template exceeds its time or memory limit on a short chat", param="messages"
            )
        try:
            return self._template.render(
                messages, tools, True, self._template.unknown(variables), limit=work, max_bytes=_PROBE_BYTES
            )
        except RenderedTooLong as error:
            raise InvalidRequest(f"{error} for a short chat", param="messages") from None

    def _render(
        self,
        messages: Any,
        tools: Any,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        limit: WorkLimit,
    ) -> str:
        most = self._encoder.most_chars(limit)
        max_bytes = MAX_BYTES if most is None else _UTF8_BYTES * most
        variables = {**self._template.unknown(variables), **template_kwargs}
        try:
            return self._template.render(
                messages, tools, add_generation_prompt, variables, limit=limit, max_bytes=max_bytes
            )
        except RenderedTooLong as error:
            self._encoder.check_length(error.num_bytes // _UTF8_BYTES, limit)
            raise ContextLengthExceeded(str(error), param="messages") from None


def _unseen_tools(text: str, tools: Sequence[Message] | None) -> Iterator[str]:
    functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, Mapping)]
    unseen, at = list[str](), 0
    for name in (str(each.get("name")) for each in functions if isinstance(each, Mapping)):
        # Templates keep the tools' order.
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
