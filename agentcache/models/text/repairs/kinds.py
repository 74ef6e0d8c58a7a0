"""The repairs that a chat template may need, and a conversation while they are made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from agentcache.models.text.repairs.notation import CallNotation

Message = dict[str, Any]

PLACEHOLDER = "Hello."  # of a user who has said nothing yet
NO_ANSWER = "(no answer)"  # of an assistant that has said nothing
GAP = "\n\n"  # between texts that become one
SYSTEM_ROLES = ("system", "developer")


class EmptyContent(Enum):
    """How a template wants the content of a call without words."""

    EMPTY = "empty"
    NONE = "none"
    ABSENT = "absent"


class CallIds(Enum):
    """Which ids of calls a template shows."""

    AS_SENT = "as sent"
    NAMED = "functions.NAME:INDEX"  # Kimi K2, whose template shows the id and no name


@dataclass(frozen=True)
class Repairs:
    """The repairs that a template needs. Each attribute is one repair.

    Attributes:
        rename_developer: messages of the role `developer` become system messages.
        no_system_role: system messages in front become a marked part of the first user message.
        join_systems: several system messages in front become one.
        move_later_systems: system messages further behind become marked user text at their place.
        user_first: a user message stands in front of the assistant's first message, and where there is no user message.
        join_neighbours: user or assistant messages in a row become one.
        user_behind_result: user text behind a tool's result becomes a part of the result.
        one_call_a_message: calls made at once become messages of one call, each followed by its result.
        calls_without_words: text beside a call becomes a message of its own in front of it.
        words_at_calls: text beside a call stands in front of it in the rendered text.
        worded_calls_as_text: calls with text beside them become text, and their results a user's.
        results_with_calls: results of unknown calls become user text.
        calls_with_results: calls without a result get an empty one.
        fill_answers: answers without text and calls get a short text.
        plain_schemas: references, nullable types and constants in the schemas of tools are written out.
        describe_enums: where schemas are written out, descriptions also name the values of enumerations.
        fill_tools: tools and their parameters get an empty description, tools also parameters, where they have none.
        tools_as_text: tools are described in the system message.
        calls_as_text: calls become text.
        calls_as_text_without_tools: the same, where a request has no tools.
        results_as_text: where calls become text, results become a user's.
        empty_tools: a request without tools has an empty list of them.
        empty_content: content of a call without words.
        string_arguments: arguments of calls are JSON text instead of an object.
        call_ids: ids of calls and of their results.
        offer_variables: the template gets variables that some templates demand: the tools, the date, and empty
            special tokens for those that the tokenizer lacks.
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
        """The repairs by the names of their attributes, in order."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) != each.default)

    def with_(self, *names: str) -> Repairs:
        """These and further repairs, by the names of attributes."""
        switched: dict[str, Any] = dict.fromkeys(names, True)
        return replace(self, **switched)


# The last resort, for a conversation that a template refuses all the same: user and assistant text in turns.
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

# Where there is no template, or one that refuses every chat: each message is a line with its role.
NO_TEMPLATE = Repairs(tools_as_text=True, calls_as_text=True)


@dataclass
class Work:
    """A conversation while it is repaired. Messages are replaced, never changed in place."""

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
    """How many system messages stand in front."""
    return next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM_ROLES), len(messages))
