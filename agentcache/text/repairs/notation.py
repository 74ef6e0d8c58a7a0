"""Writes calls, tools and results as text, for templates that do not show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from agentcache.api.model import HARMONY, ReplyFormat
from agentcache.text.json_values import write_json
from agentcache.text.replies.call_syntax import CallSyntax
from agentcache.text.replies.dialects import call_syntax

Message = dict[str, Any]

_HARMONY_CALL = CallSyntax("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "<|call|>")


@dataclass(frozen=True)
class CallNotation:
    """Text form of calls, readable by the reply reader. `opening` is the marker before calls or empty."""

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
    """Return a reply format's notation with sealed control tokens; default: `<tool_call>` with JSON."""
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
