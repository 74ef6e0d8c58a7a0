"""Applies repairs to a conversation. Only the template sees the result.

A step depends only on the template and earlier messages: a conversation's text is a prefix of a longer one's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentcache.text.repairs import calls, roles
from agentcache.text.repairs.kinds import CallNotation, Message, Repairs, Work

# Renders messages and tools, with further variables.
Render = Callable[[Sequence[Message], Sequence[Message] | None, Mapping[str, Any]], str]

# Repairs that need a step, in this order; docs/server.md lists the steps.
_STEPS: tuple[tuple[Callable[[Work], None], tuple[str, ...]], ...] = (
    (calls.plain_schemas, ("plain_schemas",)),
    (calls.fill_tools, ("fill_tools",)),
    (calls.offer_variables, ("offer_variables",)),
    (roles.rename_developer, ("rename_developer",)),
    (roles.join_systems, ("join_systems",)),
    (calls.tools_as_text, ("tools_as_text",)),
    (roles.move_later_systems, ("move_later_systems",)),
    (calls.worded_calls_as_text, ("worded_calls_as_text",)),
    (calls.pair_calls, ("results_with_calls", "calls_with_results")),
    (calls.named_ids, ("call_ids",)),
    (calls.one_call_a_message, ("one_call_a_message",)),
    (calls.calls_as_text, ("calls_as_text", "calls_as_text_without_tools")),
    (roles.system_in_user, ("no_system_role",)),
    (roles.user_first, ("user_first",)),
    (roles.user_behind_result, ("user_behind_result",)),
    (calls.words_in_front, ("calls_without_words",)),
    (roles.join_neighbours, ("join_neighbours",)),
    (calls.words_at_calls, ("words_at_calls",)),
    (roles.fill_answers, ("fill_answers",)),
    (calls.empty_tools, ("empty_tools",)),
    (calls.string_arguments, ("string_arguments",)),
    (calls.empty_content, ("empty_content",)),
    (roles.named_thoughts, ("thoughts",)),
)


def repaired(
    messages: Sequence[Message], tools: Sequence[Message] | None, repairs: Repairs, notation: CallNotation
) -> Work:
    """Apply `repairs` to messages from `messages.plain_messages`."""
    work = Work([dict(message) for message in messages], None if tools is None else list(tools), repairs, notation)
    for step, names in _STEPS:
        if repairs.change(*names):
            step(work)
    return work


def rendered(work: Work, render: Render) -> str:
    """Render a repaired conversation. Raises as `render`."""
    text = render(work.messages, work.tools, work.variables)
    return calls.with_words(text, work.words, work.notation.opening) if work.words else text
