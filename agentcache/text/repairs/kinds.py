"""Data types of repairs for chat templates."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from agentcache.text.messages import THOUGHT
from agentcache.text.repairs.notation import CallNotation

Message = dict[str, Any]

PLACEHOLDER = "Hello."
NO_ANSWER = "(no answer)"
GAP = "\n\n"
SYSTEM_ROLES = ("system", "developer")


class EmptyContent(Enum):
    """Content of a call without text."""

    EMPTY = "empty"
    NONE = "none"
    ABSENT = "absent"


class CallIds(Enum):
    """Form of call ids."""

    AS_SENT = "as sent"
    NAMED = "functions.NAME:INDEX"  # Kimi K2 shows the id, not the name


class ThoughtField(Enum):
    """Fields of a message under which a template reads the thought."""

    USUAL = (THOUGHT,)  # also "thinking" (see `ChatTemplate`)
    REASONING = ("reasoning",)
    SHORT = ("thought",)
    BLOCKS = ()  # a block of the content
    ALL = (THOUGHT, "reasoning", "thought")  # none is seen to be read; a request's variables may change that


@dataclass(frozen=True)
class Repairs:
    """The repairs that a chat template needs.

    Attributes:
        no_system_role: leading system messages as marked part of the first user message.
        move_later_systems: later system messages as marked user text in place.
        user_first: a user message inserted before a leading assistant message, or in a chat without one.
        join_neighbours: consecutive user or assistant messages as one.
        user_behind_result: user text after a tool result as part of it.
        one_call_a_message: parallel calls as one message each, followed by its result.
        calls_without_words: text beside a call as a message before it.
        words_at_calls: text beside a call before it in the rendered text.
        worded_calls_as_text: calls beside text, with their results, as text.
        results_with_calls: results of unknown calls as user text.
        calls_with_results: empty results for calls without one.
        plain_schemas: references, nullable types and constants written out.
        describe_enums: with `plain_schemas`, enumeration values in descriptions.
        fill_tools: empty descriptions and parameters where missing.
        tools_as_text: tools in the system message.
        calls_as_text_without_tools: `calls_as_text` in requests without tools.
        results_as_text: with calls as text, results as user text.
        thoughts: fields of thoughts.
        offer_variables: variables for tools, date and missing special tokens.
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
    thoughts: ThoughtField = ThoughtField.ALL

    @property
    def names(self) -> tuple[str, ...]:
        usual = (ThoughtField.USUAL,)
        return tuple(each.name for each in fields(self) if getattr(self, each.name) not in (each.default, *usual))

    def with_(self, *names: str) -> Repairs:
        switched: dict[str, Any] = dict.fromkeys(names, True)
        return replace(self, **switched)


# Last resort: alternating user and assistant text.
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

# Without a usable template: each message is a line with its role.
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
    """Count the leading system messages."""
    return next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM_ROLES), len(messages))
