"""Tool calls, told from the text around them while it is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.models.text.tool_calls import ToolCall, ToolFormat
from agentcache.report import ModelInfo
from agentcache.server.validate import Reader

Part = str | ToolCall


@dataclass(frozen=True)
class Tools:
    """The tools of a request, for a model that can call them; without `format` all text is text."""

    shown: Sequence[Mapping[str, Any]] = ()
    format: ToolFormat | None = None

    def reader(self) -> ToolCallReader:
        return ToolCallReader(self)

    def split(self, text: str) -> list[Part]:
        """A whole answer in its parts."""
        reader = self.reader()
        return [*reader.add(text), *reader.finish()]


def tools_for(model: ModelInfo, shown: Sequence[Mapping[str, Any]] | None, body: Reader) -> Tools:
    """How calls of the request `body` are told from text; `agentcache.parse_tools` false leaves them where they are."""
    parse = body.object("agentcache").boolean("parse_tools", True)
    if not shown or not parse or model.tool_format is None:
        return Tools()
    return Tools(shown, ToolFormat.named(model.tool_format))


class ToolCallReader:
    """Takes text as it comes, gives parts as soon as they are certain. White space around calls belongs to nobody."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._after_call = False

    def add(self, text: str) -> list[Part]:
        if self._tools.format is None:
            return [text] if text else []
        self._text += text
        return self._take(self._tools.format)

    def finish(self) -> list[Part]:
        """What is left when no more text comes. A call that was cut off is text."""
        rest, self._text = self._text, ""
        form = self._tools.format
        if form is not None and not form.end and rest.lstrip().startswith(form.start):
            return self._parse(form, rest.lstrip())
        return [rest] if rest.strip() or (rest and not self._after_call) else []

    def _take(self, form: ToolFormat) -> list[Part]:
        parts: list[Part] = []
        while (start := self._text.find(form.start)) >= 0:
            parts += self._shown(self._text[:start].rstrip())
            self._text = self._text[start:]
            end = self._text.find(form.end, len(form.start)) if form.end else -1
            if end < 0:
                return parts
            whole, self._text = self._text[: end + len(form.end)], self._text[end + len(form.end) :]
            parts += self._parse(form, whole)
        certain = _certain(self._text, form.start)
        parts += self._shown(self._text[:certain])
        self._text = self._text[certain:]
        return parts

    def _shown(self, text: str) -> list[Part]:
        text = text.lstrip() if self._after_call else text
        if not text:
            return []
        self._after_call = False
        return [text]

    def _parse(self, form: ToolFormat, whole: str) -> list[Part]:
        inner = whole[len(form.start) : len(whole) - len(form.end)]
        try:
            calls = form.parse(inner, self._tools.shown)
        except ValueError:
            return self._shown(whole)
        self._after_call = True
        return list(calls)


def _certain(text: str, start: str) -> int:
    """Length of the beginning of `text` that is neither the beginning of a call nor white space in front of one."""
    lengths = range(min(len(start) - 1, len(text)), 0, -1)
    held = next((n for n in lengths if start.startswith(text[-n:])), 0)
    return len(text[: len(text) - held].rstrip())
