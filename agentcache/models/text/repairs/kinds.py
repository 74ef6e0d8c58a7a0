"""The repairs that a chat template may need, and the state of a conversation under repair."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from agentcache.models.text.repairs.notation import CallNotation

Message = dict[str, Any]

PLACEHOLDER = "Hello."  # content of an inserted user message
NO_ANSWER = "(no answer)"  # content of an empty reply
GAP = "\n\n"  # between joined texts
SYSTEM_ROLES = ("system", "developer")


class EmptyContent(Enum):
    """Content of a call without text."""

    EMPTY = "empty"
    NONE = "none"
    ABSENT = "absent"


class CallIds(Enum):
    """Form of call ids."""

    AS_SENT = "as sent"
    NAMED = "functions.NAME:INDEX"  # Kimi K2: the template shows the id, not the name


@dataclass(frozen=True)
class Repairs:
    """The repairs that a chat template needs.

    Attributes:
        rename_developer: developer messages become system messages.
        no_system_role: leading system messages become a marked part of the first user message.
        join_systems: leading system messages become one.
        move_later_systems: later system messages become marked user text in place.
        user_first: a user message is inserted before a leading assistant message, or if there is none.
        join_neighbours: consecutive user or assistant messages become one.
        user_behind_result: user text after a tool result becomes part of the result.
        one_call_a_message: parallel calls become one message each, followed by its result.
        calls_without_words: text beside a call becomes a separate message before it.
        words_at_calls: text beside a call is inserted before it in the rendered text.
        worded_calls_as_text: calls with text become text, their results user text.
        results_with_calls: results of unknown calls become user text.
        calls_with_results: calls without a result get an empty one.
        fill_answers: replies without text and calls get a short text.
        plain_schemas: references, nullable types and constants in tool schemas are written out.
        describe_enums: with `plain_schemas`, descriptions list enumeration values.
        fill_tools: missing descriptions and parameters of tools become empty ones.
        tools_as_text: the system message describes the tools.
        calls_as_text: calls become text.
        calls_as_text_without_tools: the same in requests without tools.
        results_as_text: with calls as text, results become user text.
        empty_tools: missing tools become an empty list.
        empty_content: content of a call without text.
        string_arguments: call arguments become JSON text.
        call_ids: form of call ids.
        offer_variables: the template gets variables for tools, date and missing special tokens.
    """

    rename_developer: bool = False
    no_system_role: bool = False
    join_systems: bool = False
    move_later_systems: bool = False
    user_first: bool = False
    join_neighbours: bool = False
    user_behind_result: bool = False
    one_call_a_message: bool = False
    calls_without_words: bool = False
    words_at_calls: bool = False
    worded_calls_as_text: bool = False
    results_with_calls: bool = False
    calls_with_results: bool = False
    fill_answers: bool = False
    plain_schemas: bool = False
    describe_enums: bool = False
    fill_tools: bool = False
    tools_as_text: bool = False
    calls_as_text: bool = False
    calls_as_text_without_tools: bool = False
    results_as_text: bool = False
    empty_tools: bool = False
    empty_content: EmptyContent = EmptyContent.EMPTY
    call_ids: CallIds = CallIds.AS_SENT
    string_arguments: bool = False
    offer_variables: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the active repairs."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) != each.default)

    def with_(self, *names: str) -> Repairs:
        switched: dict[str, Any] = dict.fromkeys(names, True)
        return replace(self, **switched)


# Last resort for a refused conversation: alternating user and assistant text.
PLAINEST = Repairs(
    rename_developer=True,
    no_system_role=True,
    join_systems=True,
    move_later_systems=True,
    user_first=True,
    join_neighbours=True,
    tools_as_text=True,
    calls_as_text=True,
    calls_as_text_without_tools=True,
    results_as_text=True,
    fill_answers=True,
    offer_variables=True,
)

# For a missing template, or one that refuses every chat: each message is a line with its role.
NO_TEMPLATE = Repairs(tools_as_text=True, calls_as_text=True)


@dataclass
class Work:
    """A conversation under repair. Messages are replaced, never changed in place."""

    messages: list[Message]
    tools: list[Message] | None
    repairs: Repairs
    notation: CallNotation
    notes: list[str] = field(default_factory=list)
    ends_with_placeholder: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def num_leading(messages: list[Message]) -> int:
    """Return the number of leading system messages."""
    return next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM_ROLES), len(messages))
