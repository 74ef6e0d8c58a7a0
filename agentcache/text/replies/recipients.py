"""Parsers for headers that name a text's recipient: the user, a tool, or the model itself."""

from __future__ import annotations

import re
from dataclasses import replace

from agentcache.text.replies.calls import LONGEST_HEADER, SPACE, CallReader, CallSink, Left, Tools
from agentcache.text.replies.json_calls import HeaderCall

_TO_SELF = "to=self"
_EVERYONE = "all"
_BEGINS = re.compile(r"\s*(t(o(=.*)?)?)?", re.DOTALL)


class HeaderEnd:
    """Drops a header up to its end marker `message`. A header `to=self` stays: it opens reasoning."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._text = ""

    def feed(self, text: str, final: bool) -> Left | None:
        self._text += text
        header, found, rest = self._text.partition(self._message)
        # A call that a grammar demands has no header.
        if len(header) > LONGEST_HEADER or _BEGINS.fullmatch(header) is None:
            return Left(rest=self._text)
        if found:
            return Left(rest=f"{_TO_SELF}{self._message}{rest}" if header.strip(SPACE) == _TO_SELF else rest)
        return Left(rest=self._text) if final else None


class LineCalls:
    """Parses a line with a tool name and JSON after it, or with `all` and text after it.

    Args:
        marker: marker before the line; empty if the prompt has it.
    """

    def __init__(self, sink: CallSink, tools: Tools, marker: str) -> None:
        self._sink = sink
        self._tools = tools
        self._marker = marker
        self._text = ""
        self._call: CallReader | None = None

    def feed(self, text: str, final: bool) -> Left | None:
        if self._call is not None:
            return self._read_call(self._call, text, final)
        self._text += text
        line, newline, rest = self._text.partition("\n")
        if not newline and not final and len(line) <= LONGEST_HEADER:
            return None
        name = line.strip(SPACE)
        if newline and name == _EVERYONE:
            return Left(rest=rest)
        if not newline or not self._tools.has(name):
            return Left(shown=self._marker + line + newline, rest=rest, has_failed=True)
        self._call = HeaderCall(self._sink, "", lambda header: name if header.strip(SPACE) == name else None)
        return self._read_call(self._call, self._text, final)

    def _read_call(self, call: CallReader, text: str, final: bool) -> Left | None:
        left = call.feed(text, final)
        return replace(left, shown=self._marker + left.shown) if left is not None and left.has_failed else left
