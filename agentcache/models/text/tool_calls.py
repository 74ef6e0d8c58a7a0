"""How model families write tool calls in their text. The formats are mlx-lm's (`mlx_lm/tool_parsers`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.models.text.json_values import MAX_DEPTH, parse_json, written_and_read

# Clients send calls back inside of messages: what they get must leave room for that.
_MAX_DEPTH = MAX_DEPTH - 10


@dataclass(frozen=True)
class ToolCall:
    """A call the model asks for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """Where calls begin and end in the text, and how to read what is between; `end` may be empty: the text's end."""

    start: str
    end: str
    _parse: Callable[[str, Any], Any]

    @classmethod
    def named(cls, name: str) -> ToolFormat:
        """mlx-lm's format of that name."""
        module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        return cls(module.tool_call_start, module.tool_call_end, module.parse_tool_call)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """The calls in `text`, which stood between `start` and `end`.

        Raises:
            ValueError: they are not written as they should be.
        """
        try:
            parsed = self._parse(text, tools)
            return [_tool_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception as error:  # the parsers are many, and what they raise on nonsense is not documented
            raise ValueError(f"no tool call: {error!r:.100}") from error


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    arguments = call["arguments"]
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    name, arguments = written_and_read([call["name"], arguments], max_depth=_MAX_DEPTH)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("a name and an object of arguments are expected")
    return ToolCall(name, arguments)
