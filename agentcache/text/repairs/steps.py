"""Applies repairs to a conversation. Only the template sees the result.

A step depends only on the template and earlier messages: a conversation's text is a prefix of a longer one's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.text.repairs import calls, roles
from agentcache.text.repairs.kinds import CallNotation, Message, Repairs, Work

# Renders messages and tools, with further variables.
Render = Callable[[Sequence[Message], Sequence[Message] | None, Mapping[str, Any]], str]

# In this order; docs/server.md lists the steps.
_STEPS: tuple[Callable[[Work], None], ...] = (
    calls.plain_schemas,
    calls.fill_tools,
    calls.offer_variables,
    roles.rename_developer,
    roles.join_systems,
    calls.tools_as_text,
    roles.move_later_systems,
    calls.worded_calls_as_text,
    calls.pair_calls,
    calls.named_ids,
    calls.one_call_a_message,
    calls.calls_as_text,
    roles.system_in_user,
    roles.user_first,
    roles.user_behind_result,
    calls.words_in_front,
    roles.join_neighbours,
    calls.words_at_calls,
    roles.fill_answers,
    calls.empty_tools,
    calls.string_arguments,
    calls.empty_content,
    roles.named_thoughts,
)


@dataclass(frozen=True)
class Repaired:
    """A conversation for the template.

    Args:
        words, opening: arguments of `calls.with_words`.
        notes: descriptions of the changes.
        ends_with_placeholder: whether the last message is inserted.
    """

    messages: list[Message]
    tools: list[Message] | None
    variables: Mapping[str, str]
    words: Mapping[str, str]
    opening: str
    notes: tuple[str, ...] = ()
    ends_with_placeholder: bool = False

    def rendered(self, render: Render) -> str:
        return calls.with_words(render(self.messages, self.tools, self.variables), self.words, self.opening)


def repaired(
    messages: Sequence[Message], tools: Sequence[Message] | None, repairs: Repairs, notation: CallNotation
) -> Repaired:
    """Apply `repairs` to messages from `messages.plain_messages`."""
    work = Work([dict(message) for message in messages], None if tools is None else list(tools), repairs, notation)
    for step in _STEPS:
        step(work)
    return Repaired(
        work.messages,
        work.tools,
        work.variables,
        work.words,
        notation.opening,
        tuple(work.notes),
        work.ends_with_placeholder,
    )
