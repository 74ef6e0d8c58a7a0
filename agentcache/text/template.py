"""Renders the model's untrusted chat template under limits."""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from agentcache.compat import TokenizerWrapper, renders_by_code
from agentcache.errors import InvalidRequest, UnsupportedModel
from agentcache.system.confined import ChildBroke, ConfinedWork, OverLimit, ReplyTooLong
from agentcache.text.marks import NO_SEALS, Marks
from agentcache.text.messages import REASONING_KEYS, with_strings
from agentcache.text.template_child import SECONDS_PER_BYTE, RenderOutcome
from agentcache.text.work_limit import WorkLimit

MAX_BYTES = 64 << 20
REFUSED = "refused_by_chat_template"

# Every template accepts at least one.
_USER = {"role": "user", "content": "hello"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"place": "garden"}}}
_LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
_HARMLESS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([_USER], None),
    ([{"role": "system", "content": "be kind"}, _USER, {"role": "assistant", "content": "hi"}, _USER], None),
    (
        [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "look", "content": "cat", "tool_call_id": "call00001"},
        ],
        [_LOOK],
    ),
)

_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "processor_kwargs",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "self",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


class RenderedTooLong(Exception):
    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"the model's chat template wrote {num_bytes} bytes")
        self.num_bytes = num_bytes


def check_kwargs(template_kwargs: Mapping[str, Any]) -> None:
    reserved = _RESERVED.intersection(template_kwargs)
    if reserved:
        raise InvalidRequest(f"{sorted(reserved)} cannot be set in a request.", param="chat_template_kwargs")


class ChatTemplate:
    """Renders a chat template as transformers does, in a confined child process. Thread-safe.

    Templates that are code of mlx-lm or transformers run in this process.
    """

    def __init__(self, wrapper: TokenizerWrapper, marks: Marks) -> None:
        self._wrapper = wrapper
        self._marks = marks
        self._work = ConfinedWork("agentcache.text.template_child", seconds_per_byte=SECONDS_PER_BYTE)
        self._sealed: dict[str, bool] = {}
        self._greedy: set[str] = set()  # they hit a limit on `_HARMLESS`

    @property
    def exists(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    def unknown(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in variables.items() if name not in self._wrapper.special_tokens_map}

    @cached_property
    def _by_code(self) -> bool:
        return renders_by_code(self._wrapper)

    def start(self) -> None:
        if not self._by_code:
            self._work.start()

    def close(self) -> None:
        self._work.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        *,
        limit: WorkLimit,
        max_bytes: int = MAX_BYTES,
    ) -> str:
        """Return marked text; messages and variables have marked strings.

        Raises InvalidRequest (refused, limit), UnsupportedModel (syntax error), RenderedTooLong (over `max_bytes`).
        """
        if self._by_code:
            return self._run_code(messages, tools, add_generation_prompt, template_kwargs)
        if not messages:
            raise InvalidRequest("Cannot apply the chat template to an empty conversation.", param="messages")
        tools = None if tools is None else list(tools)
        template = self._choose(tools)
        return self._render(
            template,
            self._is_sealed(template, limit),
            [_message(message) for message in messages],
            tools,
            add_generation_prompt,
            template_kwargs,
            limit,
            max_bytes,
        )

    def _render(
        self,
        template: str,
        is_sealed: bool,
        messages: list[dict[str, Any]],
        tools: list[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        limit: WorkLimit,
        max_bytes: int,
    ) -> str:
        specials = self._wrapper.special_tokens_map
        variables = {
            **(with_strings(specials, self._marks.seals.seal) if is_sealed else specials),
            "enable_thinking": self._wrapper.has_thinking,
            **template_kwargs,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        seals = self._marks.seals.for_template if is_sealed else NO_SEALS
        kind, content = self._ask((template, seals, variables, max_bytes), limit)
        text = self._marks.mark_unsealed(content) if is_sealed else self._marks.unsealed(content)
        if kind == RenderOutcome.TEXT:
            return text
        if kind == RenderOutcome.TOO_LONG:
            raise RenderedTooLong(int(text))
        text = self._marks.unmark(text)
        if kind == RenderOutcome.SYNTAX:
            raise UnsupportedModel(f"The model's chat template cannot be read: {text}")
        raise _refused(text)

    def _is_sealed(self, template: str, limit: WorkLimit) -> bool:
        # No seals if the template builds control tokens, as "<|{}|>".format(role).
        if template not in self._sealed:
            try:
                self._sealed[template] = all(self._keeps_controls(template, *each, limit) for each in _HARMLESS)
            except InvalidRequest:  # a limit: do not try again
                self._sealed[template] = True
                self._greedy.add(template)
        return self._sealed[template]

    def is_greedy(self, tools: Sequence[Mapping[str, Any]] | None, limit: WorkLimit) -> bool:
        """Whether the template exceeds a time or memory limit on a few words."""
        if self._by_code:
            return False
        template = self._choose(None if tools is None else list(tools))
        self._is_sealed(template, limit)
        return template in self._greedy

    def _keeps_controls(self, template: str, messages: Any, tools: Any, limit: WorkLimit) -> bool:
        try:
            sealed, plain = (
                self._render(template, is_sealed, messages, tools, True, {}, limit, MAX_BYTES)
                for is_sealed in (True, False)
            )
        except RenderedTooLong:
            return True
        except InvalidRequest as error:
            if error.code != REFUSED:
                raise
            return True
        return self._marks.controls_in(sealed) == self._marks.controls_in(plain)

    def _run_code(
        self, messages: Any, tools: Any, add_generation_prompt: bool, template_kwargs: Mapping[str, Any]
    ) -> str:
        try:
            text = self._wrapper.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **template_kwargs
            )
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise _refused(error) from error
        return str(text)

    def _choose(self, tools: Any) -> str:
        # Models may have another template for tools.
        try:
            return str(self._wrapper.get_chat_template(None, tools))
        except ValueError as error:
            raise InvalidRequest(
                f"The model has no chat template for these messages: {error}", param="messages"
            ) from error

    def _ask(self, request: tuple[str, bytes, dict[str, Any], int], limit: WorkLimit) -> tuple[bytes, bytearray]:
        try:
            packed = marshal.dumps(request)
        except ValueError:
            raise InvalidRequest("Messages must be JSON values.", param="messages") from None
        try:
            return self._work.ask([packed], max_bytes=request[-1], go_on=limit.go_on)
        except OverLimit as error:
            raise _failed(f"took {error.what}") from None
        except ReplyTooLong as error:
            raise RenderedTooLong(error.num_bytes) from None
        except ChildBroke:
            raise _failed("broke off") from None


def _refused(why: object) -> InvalidRequest:
    message = f"The model's chat template refuses these messages: {why}"
    return InvalidRequest(message, param="messages", code=REFUSED)


def _failed(how: str) -> InvalidRequest:
    return InvalidRequest(f"The model's chat template {how}.", param="messages", code="template_failed")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    # As in transformers, the thought has two names.
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    thought = next((kept[key] for key in REASONING_KEYS if key in kept), None)
    return kept if thought is None else {"thinking": thought, **kept, "reasoning_content": thought}
