"""Renders sample replies with tool calls, to find the reply format."""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentcache.errors import Overloaded
from agentcache.system.confined import ChildBroke, ConfinedWork, OverLimit, ReplyTooLong
from agentcache.text.marks import NO_SEALS
from agentcache.text.replies.written import (
    THOUGHT,
    TOOLS,
    USER,
    WrittenReply,
    call_message,
    with_string_arguments,
    written_reply,
)
from agentcache.text.template_child import RenderOutcome

_MAX_BYTES = 1 << 20
# Some templates demand these variables.
DEFAULTS = {"bos_token": "", "eos_token": "", "functions": "", "datetime": ""}
_THOUGHT = {"reasoning_content": THOUGHT, "thinking": THOUGHT, "reasoning": THOUGHT}
# Templates accept different samples.
_WAYS: tuple[dict[str, Any], ...] = (
    call_message(2, content="", **_THOUGHT),
    call_message(2, content=""),
    call_message(2, content=None),
    call_message(1, content=""),
    call_message(1, content=None),
    with_string_arguments(call_message(2, content="")),
)


@lru_cache(maxsize=64)
def write_replies(template: str, special_tokens: tuple[tuple[str, str], ...]) -> tuple[WrittenReply, ...]:
    """Return the first sample in which the template shows the calls, or else all that it accepts.

    Renders in a confined process; empty on a limit.
    """
    if "tool_calls" not in template:
        return ()
    work = ConfinedWork("agentcache.text.template_child")
    try:
        return write_in(work, template, {**DEFAULTS, **dict(special_tokens)})
    except (OverLimit, ReplyTooLong, ChildBroke, Overloaded):
        return ()
    finally:
        work.close()


def write_in(work: ConfinedWork, template: str, variables: Mapping[str, Any]) -> tuple[WrittenReply, ...]:
    """As `write_replies`, but raise on a limit."""
    prompt = render_in(work, template, variables, [USER], TOOLS, add_generation_prompt=True)
    if prompt is None:
        return ()
    replies: list[WrittenReply] = []
    for message in _WAYS:
        whole = render_in(work, template, variables, [USER, message], TOOLS, add_generation_prompt=False)
        if whole is None:
            continue
        replies.append(written_reply(prompt, whole, len(message["tool_calls"])))
        if replies[-1].shows_calls:
            return (replies[-1],)
    return tuple(replies)


def render_in(
    work: ConfinedWork,
    template: str,
    variables: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
) -> str | None:
    """Render; None if refused."""
    given = {
        **variables,
        "messages": [dict(message) for message in messages],
        "tools": list(tools),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    request = marshal.dumps((template, NO_SEALS, given, _MAX_BYTES))
    kind, content = work.ask([request], max_bytes=_MAX_BYTES)
    return content.decode("utf-8", "replace") if kind == RenderOutcome.TEXT else None
