"""Streaming parser for calls as nested tags, with a token before each tag: MiniMax M3."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from agentcache.text.json_values import MAX_REPLY_DEPTH, JsonText, json_string, write_json
from agentcache.text.replies.calls import LONGEST_HEADER, SPACE, CallSink, Left, Steps, Tools, partial_end
from agentcache.text.replies.tagged_calls import converted, name_in

_ITEM = "item"


@dataclass
class _Element:
    # `types`: of its JSON schema; empty if unknown.
    name: str
    max_depth: int
    types: frozenset[str] = frozenset()
    text: list[str] = field(default_factory=list)
    parts: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def value(self) -> Any:
        if not self.parts:
            text = "".join(self.text)
            if not text and self.types & {"array", "object"}:
                return [] if "array" in self.types else {}
            return converted(text, self.types, untyped=True, max_depth=self.max_depth)
        if all(name == _ITEM for name, _ in self.parts):
            return [value for _, value in self.parts]
        return dict(self.parts)


class _At(Enum):
    CALL = auto()
    ARGUMENTS = auto()
    JSON = auto()


class NestedCalls(Steps):
    """Parses nested calls up to `close`. The token `sign` precedes each tag."""

    _at: _At

    def __init__(self, sink: CallSink, close: str, tools: Tools, sign: str) -> None:
        super().__init__(sink, close)
        self._tools = tools
        self._sign = sign
        self._opening = f"{sign}<invoke"
        self._at = _At.CALL
        self._any = False
        self._name = ""
        self._num_arguments = 0
        self._open: list[_Element] = []
        self._json = JsonText()

    def _step(self, final: bool) -> Left | None:
        match self._at:
            case _At.CALL:
                return self._next_call(final)
            case _At.ARGUMENTS:
                return self._in_arguments()
            case _At.JSON:
                return self._in_json()

    def _next_call(self, final: bool) -> Left | None:
        text = self._text = self._text.lstrip(SPACE)
        if not text.startswith(self._opening):
            if partial_end(text, [self._opening]) == len(text) and not final:
                return None
            return self._after(text, final) if self._any else self._failed()
        end = text.find(">", len(self._sign) + 1)
        if end < 0:
            return self._failed() if len(text) > LONGEST_HEADER else None
        self._name, self._num_arguments = name_in(text[len(self._opening) : end]), 0
        self._sink.start(self._name)
        self._started = self._any = True
        self._text, self._at, self._open, self._json = text[end + 1 :], _At.ARGUMENTS, [], JsonText()
        return None

    def _in_arguments(self) -> Left | None:
        text = self._text
        at = text.find(self._sign)
        if at == 0:
            return self._tag()
        said = text[:at] if at > 0 else text[: len(text) - partial_end(text, [self._sign])]
        if self._open:
            self._open[-1].text.append(said)
        elif said.lstrip(SPACE).startswith("{") and not self._num_arguments:
            self._text, self._at = text.lstrip(SPACE), _At.JSON
            return None
        self._text = text[len(said) :]
        return None

    def _tag(self) -> Left | None:
        text, begin = self._text, len(self._sign)
        end = text.find(">", begin + 1)
        if end < 0 and len(text) <= LONGEST_HEADER:
            return None
        if not 0 <= end <= LONGEST_HEADER:
            return self._break_off()
        tag = text[begin:end].lstrip("<")
        self._text = text[end + 1 :]
        if not tag.startswith("/"):
            max_depth = MAX_REPLY_DEPTH - 1 - len(self._open)
            if not max_depth:
                return self._break_off()
            types = frozenset[str]() if self._open else self._tools.types(self._name, tag)
            self._open.append(_Element(tag, max_depth, types))
        elif self._open:
            self._end_element()
        else:
            self._end_call()
        return None

    def _end_element(self) -> None:
        element = self._open.pop()
        if self._open:
            self._open[-1].parts.append((element.name, element.value))
            return
        key, value = json_string(element.name, ensure_ascii=False), write_json(element.value, ensure_ascii=False)
        self._sink.arguments(f"{', ' if self._num_arguments else '{'}{key}: {value}")
        self._num_arguments += 1

    def _end_call(self) -> None:
        if not self._json.is_done:
            self._sink.arguments("}" if self._num_arguments else "{}")
        self._sink.end()
        self._started, self._at = False, _At.CALL

    def _in_json(self) -> Left | None:
        self._read_json(self._json)
        if self._json.is_broken:
            return self._cut_off()
        if self._json.is_done:
            self._at = _At.ARGUMENTS
        return None

    def _break_off(self) -> Left:
        self._open = []
        return self._cut_off()

    def _cut_off(self) -> Left:
        if not self._started:
            return Left(rest=self._text) if self._any else self._failed()
        if self._at is _At.JSON:
            self._end_json(self._json)
        else:
            self._end_call()
        return Left(rest="" if self._open else self._text)
