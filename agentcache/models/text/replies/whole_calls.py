"""Calls that mlx-lm's own parsers read, once they are complete (`mlx_lm/tool_parsers`)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlx_lm.tool_parsers import gemma4

from agentcache.models.text.json_values import MAX_DEPTH, parse_json, written_and_read
from agentcache.models.text.replies.calls import CallSink, Left, Tools

# Clients send calls back inside of messages: what they get must leave room for that.
_GEMMA_QUOTE, _GEMMA4_QUOTE = "<escape>", '<|"|>'
_MAX_DEPTH = MAX_DEPTH - 10


class WholeCalls:
    """Calls up to the marker that closes them, read at once.

    Args:
        spell: gives the text with all markers as their strings.
        parser: mlx-lm's name of the format.
    """

    def __init__(self, sink: CallSink, close: str, tools: Tools, parser: str, spell: Callable[[str], str]) -> None:
        self._sink = sink
        self._close = close
        self._tools = tools
        self._parser = parser
        self._spell = spell
        self._text = ""

    def feed(self, text: str, final: bool) -> Left | None:
        searched = max(0, len(self._text) - len(self._close))
        self._text += text
        end = self._text.find(self._close, searched)
        if end < 0 and not final:
            return None
        inside, rest = (self._text, "") if end < 0 else (self._text[:end], self._text[end + len(self._close) :])
        try:
            calls = parse_calls(self._parser, self._spell(inside), self._tools)
        except ValueError:
            return Left(shown=inside, rest=rest, has_failed=True)
        for name, arguments in calls:
            self._sink.whole(name, arguments)
        return Left(rest=rest)


def parse_calls(parser: str, text: str, tools: Tools) -> list[tuple[str, str]]:
    """Names and arguments (the JSON text of an object) of the calls in `text`, by mlx-lm's parser of that name.

    Raises:
        ValueError: they are not written as they should be.
    """
    try:
        # A call that is demanded may have to be written as JSON (`grammars/call_syntax.py`).
        parsed = parse_json(text) if text.startswith('{"name"') else _parse(parser, text, tools)
        return [_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
    except Exception as error:  # the parsers are many, and what they raise on nonsense is not documented
        raise ValueError(f"no tool call: {error!r:.100}") from error


def _parse(parser: str, text: str, tools: Tools) -> Any:
    if parser == "function_gemma":
        # Written as Gemma 4's but for the quotes; of its own parser lists and braces are the end.
        with suppress(ValueError):
            return gemma4.parse_tool_call(text.replace(_GEMMA_QUOTE, _GEMMA4_QUOTE))
    return importlib.import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call(text, tools.shown)


def _call(call: Any) -> tuple[str, str]:
    arguments = call["arguments"]
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    name, arguments = written_and_read([call["name"], arguments], max_depth=_MAX_DEPTH)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("a name and an object of arguments are expected")
    return name, json.dumps(arguments, ensure_ascii=False)
