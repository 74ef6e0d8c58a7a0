"""The repairs that a chat template may need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from agentcache.api.model import HARMONY, ReplyFormat
from agentcache.text.json_values import write_json
from agentcache.text.messages import THOUGHT
from agentcache.text.replies.call_syntax import CallSyntax
from agentcache.text.replies.dialects import call_syntax

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
    AS_SENT = "as sent"
    NAMED = "functions.NAME:INDEX"  # Kimi K2 shows the id, not the name


class ThoughtField(Enum):
    """Fields under which a template reads thoughts."""

    USUAL = (THOUGHT,)  # also "thinking" (see `ChatTemplate`)
    REASONING = ("reasoning",)
    SHORT = ("thought",)
    BLOCKS = ()  # a block of the content
    ALL = (THOUGHT, "reasoning", "thought")  # none is known to be read


_NO_CHANGE = (False, EmptyContent.EMPTY, CallIds.AS_SENT, ThoughtField.USUAL)


@dataclass(frozen=True)
class Repairs:
    """The repairs that a chat template needs (docs/server.md).

    Text beside a call: `calls_without_words` makes it a message, `words_at_calls` moves it when rendered.
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
        return tuple(each.name for each in fields(self) if getattr(self, each.name) not in (each.default, *_NO_CHANGE))

    def change(self, *names: str) -> bool:
        """Whether any of the named repairs is on."""
        return any(getattr(self, name) not in _NO_CHANGE for name in names)

    def with_(self, *names: str) -> Repairs:
        switched: dict[str, Any] = dict.fromkeys(names, True)
        return replace(self, **switched)


# Last resort: user and assistant text in turns.
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

# Without a usable template, messages are lines with their role.
NO_TEMPLATE = Repairs(tools_as_text=True, calls_as_text=True)


@dataclass
class Work:
    """A conversation under repair. Messages are never changed in place."""

    messages: list[Message]
    tools: list[Message] | None
    repairs: Repairs
    notation: CallNotation
    notes: list[str] = field(default_factory=list)
    ends_with_placeholder: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)  # to insert before calls, by mark

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def num_leading(messages: list[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM_ROLES), len(messages))


_HARMONY_CALL = CallSyntax("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "<|call|>")


@dataclass(frozen=True)
class CallNotation:
    """Text form of calls, which the reply reader reads. `opening`: the marker before calls, or empty."""

    syntax: CallSyntax
    opening: str = ""

    def calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        functions = [call.get("function") or {} for call in calls]
        return self._around([self._call(str(each.get("name")), each.get("arguments")) for each in functions])

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        definitions = "\n".join(write_json(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        example = self._around([self._call("NAME", {"ARGUMENT": "VALUE"})])
        return (
            f"You can call these functions:\n<tools>\n{definitions}\n</tools>\n"
            f"To call one, write its name and arguments like this, and wait for the result:\n{example}"
        )

    def _call(self, name: str, arguments: Any) -> str:
        syntax, argument = self.syntax, self.syntax.argument
        if argument is None or not isinstance(arguments, Mapping):
            return f"{syntax.opened(name)}{write_json(arguments, ensure_ascii=False)}{syntax.close}"
        line = "\n" if argument.on_lines else ""
        told = [
            f"{argument.name_open}{key}{argument.name_closed(_json_type(value))}"
            f"{argument.value_open}{line}{_as_text(value)}{line}{argument.close}\n"
            for key, value in arguments.items()
        ]
        return f"{syntax.opened(name)}{''.join(told)}{syntax.close}"

    def _around(self, calls: Sequence[str]) -> str:
        return f"{self.syntax.begin}{self.syntax.between.join(calls)}{self.syntax.end}"


def call_notation(form: ReplyFormat, seal: Callable[[str], str]) -> CallNotation:
    """Return a format's notation, with sealed control tokens; default: `<tool_call>` and JSON."""
    if form.dialect == HARMONY:
        return CallNotation(_sealed(_HARMONY_CALL, seal), _HARMONY_CALL.marker)
    syntax = call_syntax(form)
    return CallNotation(_sealed(syntax.as_json or syntax, seal), syntax.marker)


def result_text(content: Any) -> str:
    return f"<tool_response>\n{content or ''}\n</tool_response>"


def _sealed(value: Any, seal: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return seal(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _sealed(getattr(value, each.name), seal) for each in fields(value)})
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else write_json(value, ensure_ascii=False)


def _json_type(value: Any) -> str:
    if isinstance(value, str | bool):
        return "string" if isinstance(value, str) else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "object" if isinstance(value, Mapping) else "null" if value is None else "array"
