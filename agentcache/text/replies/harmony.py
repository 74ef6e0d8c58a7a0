"""Streaming parser for Harmony, gpt-oss's reply format (https://github.com/openai/harmony)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

from agentcache.api.model import HARMONY_MARKERS, ReplyFormat
from agentcache.text.json_values import JsonText
from agentcache.text.marks import Codes, Placed
from agentcache.text.replies.calls import SPACE, CallSink, Tools
from agentcache.text.replies.events import Event, ReasoningDelta, TextDelta, Zone, Zones

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"\s*(\w+)")
_BETWEEN_MESSAGES = "\n"


class _State(Enum):
    HEADER = auto()
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()
    BROKEN_CALL = auto()


class HarmonyReader:
    """Parses analysis as reasoning, messages to tools as calls (if `tools`), else text."""

    is_doubtful = False

    def __init__(self, form: ReplyFormat, tools: Tools | None) -> None:
        self._codes = Codes((token.name, token.is_shown) for token in form.tokens)
        codes = self._markers = [self._codes.code(marker) for marker in HARMONY_MARKERS]
        self._start, self._channel, self._constrain, self._message, *self._ends = codes
        self._any = re.compile("|".join(map(re.escape, codes)))
        self._reads_calls = tools is not None
        self._sink = CallSink(self._codes.shown, self._codes.in_json)
        self._state = _State.HEADER
        self._header: list[str] = []
        self._prompted = ""
        self._text = ""
        self._tool = ""
        self._arguments = JsonText()
        self._has_begun = False
        self._zones = Zones(self._codes.shown)
        self._undecided: list[str] = []  # a header, or plain text
        self._pause = {ReasoningDelta: "", TextDelta: ""}

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    @property
    def thought_ends(self) -> Sequence[str] | None:
        return self._codes.uncoded(self._markers) if self._state is _State.THOUGHT else None

    def begin(self, prompt_end: str) -> None:
        opened = self._codes.code(prompt_end).rpartition(self._start)[2]
        if self._message in opened:
            self._read(opened)
        else:
            self._header, self._prompted = [opened], opened

    def add(self, text: str, placed: Sequence[Placed] = ()) -> list[Event]:
        text = self._codes.coded(text, placed)
        if text.isascii() and self._state in (_State.TEXT, _State.THOUGHT):
            self._pass_on(text)
        else:
            self._read(text)
        return self._sink.take()

    def finish(self, *, cut_off: bool) -> list[Event]:
        said = "".join(self._header).removeprefix(self._prompted)
        if self._state is _State.HEADER and said and self._channel not in said:
            self._state = _State.TEXT  # the model ignores the format
            self._zones.pass_over(said.removesuffix("".join(self._undecided)))
            self._pass_on(said)
        else:
            self._zones.add("".join(self._undecided), is_said=False)
        self._end_message()
        return self._sink.take()

    def take_zones(self) -> list[Zone]:
        return self._zones.take()

    def _read(self, text: str) -> None:
        done = 0
        for found in self._any.finditer(text):
            self._pass_on(text[done : found.start()])
            self._zones.add("".join([*self._undecided, found[0]]), is_said=False)
            self._undecided.clear()
            self._mark(found[0])
            done = found.end()
        self._pass_on(text[done:])

    def _mark(self, marker: str) -> None:
        if marker == self._message and self._state is _State.HEADER:
            self._begin_message()
        elif marker in (self._start, *self._ends) or (marker == self._channel and self._state is not _State.HEADER):
            self._end_message()
            self._header = [marker] if marker == self._channel else []
        elif self._state is _State.HEADER:
            self._header.append(marker)

    def _begin_message(self) -> None:
        header = "".join(self._header)
        recipient = _RECIPIENT.search(self._codes.spelled(header))
        channel = _CHANNEL.match(header.partition(self._channel)[2])
        self._prompted, self._has_begun = "", False
        if recipient is not None and recipient[1] != "assistant" and self._reads_calls:
            self._tool = recipient[1].removeprefix("functions.")
            self._arguments, self._state = JsonText(), _State.CALL
        elif channel is not None and channel[1] == "analysis":
            self._state = _State.THOUGHT
        else:
            self._state = _State.TEXT

    def _pass_on(self, text: str) -> None:
        if not text:
            return
        if self._state in (_State.THOUGHT, _State.TEXT, _State.BROKEN_CALL):
            self._zones.add(text, is_said=self._state is not _State.THOUGHT)
        if self._state is _State.HEADER:
            self._header.append(text)
            self._undecided.append(text)
        elif self._state is _State.CALL:
            self._pass_on_arguments(text)
        else:
            kind = ReasoningDelta if self._state is _State.THOUGHT else TextDelta
            pause, self._pause[kind], self._has_begun = self._pause[kind], "", True
            self._sink.events.append(kind(pause + self._codes.without(text)))

    def _pass_on_arguments(self, text: str) -> None:
        if not self._has_begun:
            space = len(text) - len(text.lstrip(SPACE))
            self._zones.add(text[:space], is_said=False)
            text = text[space:]
            if not text:
                return
            if not text.startswith("{"):
                self._state = _State.BROKEN_CALL
                self._pass_on(text)
                return
            self._sink.start(self._tool)
            self._has_begun = True
        end = self._arguments.feed(text, 0)
        self._zones.add(text[:end] if self._arguments.is_broken else text, is_said=False)
        self._sink.arguments(self._arguments.take())
        if self._arguments.is_broken:
            self._end_message()
            self._state = _State.BROKEN_CALL
            self._pass_on(text[end:])

    def _end_message(self) -> None:
        if self._state is _State.CALL:
            if not self._has_begun:
                self._sink.start(self._tool)
                self._sink.arguments("{}")
            else:
                self._arguments.complete()
                self._sink.arguments(self._arguments.take())
            self._sink.end()
        elif self._has_begun and self._state is not _State.HEADER:
            kind = ReasoningDelta if self._state is _State.THOUGHT else TextDelta
            self._pause[kind] = _BETWEEN_MESSAGES
        self._state, self._header, self._has_begun = _State.HEADER, [], False
