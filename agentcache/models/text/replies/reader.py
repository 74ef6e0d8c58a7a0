"""Reads a reply as it comes: what is thought, what is said, which tools are called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from agentcache.models.text.marks import any_of
from agentcache.models.text.replies.calls import SPACE, CallReader, CallSink, Left, Tools, partial_end
from agentcache.models.text.replies.dialects import DIALECTS, Dialect, DialectParts, bare_object
from agentcache.models.text.replies.events import Event, ReasoningDelta, TextDelta
from agentcache.models.text.replies.format import HARMONY, ReplyFormat
from agentcache.models.text.replies.harmony import HarmonyReader
from agentcache.models.text.replies.markers import Codes, Placed


class ReplyReader(Protocol):
    """Reads one reply.

    Attributes:
        num_calls: begun so far.
    """

    @property
    def num_calls(self) -> int: ...

    def begin(self, prompt_end: str) -> None:
        """Before the first text: the end of the prompt's marked text, in which a thought may have been opened."""

    def add(self, text: str, placed: Sequence[Placed] = ()) -> list[Event]:
        """Take more text; `placed` says where in it which marker stands that is a token."""

    def finish(self, *, cut_off: bool) -> list[Event]:
        """No more text comes; `cut_off` if that is not the model's doing."""


def open_reader(form: ReplyFormat, tools: Tools | None, *, thoughts: bool) -> ReplyReader:
    """A reader for one reply.

    Args:
        tools: that may be called; None if calls are to be left in the text.
        thoughts: whether thoughts are told from text.
    """
    if form.dialect == HARMONY:
        return HarmonyReader(form, tools)
    dialect = DIALECTS.get(form.dialect or "") if tools is not None else None
    pairs = form.thoughts if thoughts else ()
    if dialect is None and not pairs:
        return PlainReader()
    return MarkedReader(form, dialect, tools or Tools(), pairs)


class PlainReader:
    """All of it is text."""

    num_calls = 0

    def begin(self, prompt_end: str) -> None:
        return None

    def add(self, text: str, placed: Sequence[Placed] = ()) -> list[Event]:
        return [TextDelta(text)] if text else []

    def finish(self, *, cut_off: bool) -> list[Event]:
        return []


class _State(Enum):
    TEXT = auto()
    THOUGHT = auto()
    CALLS = auto()


class MarkedReader:
    """Replies in which markers stand around thoughts and calls.

    White space next to thoughts and calls belongs to nobody.
    """

    def __init__(
        self, form: ReplyFormat, dialect: Dialect | None, tools: Tools, pairs: Sequence[tuple[str, str]]
    ) -> None:
        dialect = dialect or Dialect()
        strings = [*dialect.markers, *sum(pairs, ())]
        used = [token for token in form.tokens if any(token.name in string for string in strings)]
        codes = self._codes = Codes((token.name, token.is_shown) for token in used)
        self._sink = CallSink(codes.shown, codes.in_json)
        self._parts = DialectParts(self._sink, tools, codes)
        self._opens = {codes.code(marker): make for marker, make in dialect.opens.items()}
        self._bare = dialect.bare
        self._starts = {codes.code(start): codes.code(end) for start, end in pairs}
        self._plain_starts = [start for start, _ in pairs]
        self._ends = {codes.code(end) for _, end in pairs}
        noise = {codes.code(marker) for marker in dialect.noise}
        markers = [*self._opens, *self._starts, *self._ends, *noise]
        self._markers = markers
        self._any = any_of(markers)
        self._keeps_spaces = dialect.markers == ()
        self._may_begin = _beginnings(markers, r"(?!)" if self._keeps_spaces else r"\s\Z")
        # In a thought a call may begin that nobody could have spelled: models forget to close what they think.
        self._breaks = [marker for marker in self._opens if len(marker) == 1]
        self._thinks_first = form.thinks_first and bool(pairs)
        self._state = _State.TEXT
        self._text = ""  # not read yet
        self._gap = ""  # white space that may be in front of more text
        self._strips = False  # white space to come
        self._said = False
        self._thought: list[str] = []  # what began without a marker
        self._stops: list[str] = []  # what ends the thought at work, its own marker first
        self._may_stop = self._may_begin
        self._thought_gap = ""
        self._calls: CallReader | None = None

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def begin(self, prompt_end: str) -> None:
        end = prompt_end.rstrip(SPACE)
        opened = next((index for index, start in enumerate(self._plain_starts) if end.endswith(start)), None)
        if opened is not None:
            self._open_thought(list(self._starts.values())[opened])
            self._thinks_first = False
        elif self._thinks_first and not any(end.endswith(self._codes.spelled(close)) for close in self._ends):
            self._open_thought(next(iter(self._starts.values())))
        else:
            self._thinks_first = False

    def add(self, text: str, placed: Sequence[Placed] = ()) -> list[Event]:
        text = self._codes.coded(text, placed)
        if self._state is _State.TEXT and not self._text and self._is_plain(text):
            self._strips = False
            gap, self._gap = self._gap, ""
            return [TextDelta(gap + text)]
        if self._state is _State.THOUGHT and not self._text and not self._may_stop.search(text):
            self._think(text)
            return self._take()
        self._text += text
        self._read(final=False)
        return self._take()

    def finish(self, *, cut_off: bool) -> list[Event]:
        self._read(final=True)
        if self._thinks_first and self._state is _State.THOUGHT and not cut_off:
            # Nothing has marked it, neither its beginning nor its end: it was the answer.
            self._say("".join(self._thought))
        if self._state is _State.TEXT and self._gap:
            self._sink.events.append(TextDelta(self._gap))
        return self._take()

    def _is_plain(self, text: str) -> bool:
        """Whether text can be passed on at once: no marker begins in it, nor may white space at either end be none."""
        if not text or self._may_begin.search(text) is not None:
            return False
        if not self._said:
            self._said = not self._bare and not text[0].isspace()
            return self._said
        return not (self._strips and text[0].isspace())

    def _take(self) -> list[Event]:
        events = self._sink.events
        self._sink.events = []
        return events

    def _read(self, *, final: bool) -> None:
        steps = {_State.TEXT: self._in_text, _State.THOUGHT: self._in_thought, _State.CALLS: self._in_calls}
        while steps[self._state](final):
            continue

    # Each reads a piece of the text and says whether it got anywhere.

    def _in_text(self, final: bool) -> bool:
        text = self._text
        if self._bare and not self._said and text.lstrip(SPACE).startswith("{"):
            self._open_calls("", bare_object(self._parts))
            return True
        found = self._any.search(text)
        if found is None or (not final and self._may_be_longer(text[found.start() :])):
            certain = len(text) if final else len(text) - partial_end(text, self._markers)
            self._say(text[:certain])
            self._text = text[certain:]
            return False
        marker, self._text = found[0], text[found.end() :]
        self._say(text[: found.start()])
        if marker in self._starts:
            self._open_thought(self._starts[marker])
        elif marker in self._opens:
            self._open_calls(marker, self._opens[marker](self._parts))
        elif marker in self._ends:
            self._strips, self._gap = True, ""
        return True

    def _may_be_longer(self, text: str) -> bool:
        """Whether a marker of which this is the beginning may yet come."""
        return any(len(marker) > len(text) and marker.startswith(text) for marker in self._markers)

    def _say(self, text: str) -> None:
        text = self._codes.without(text)
        if self._strips or not self._said:
            stripped = text.lstrip()
            if not self._strips:
                self._gap += text[: len(text) - len(stripped)]
            text = stripped
        if not text:
            return
        self._strips, self._said = False, True
        certain = text if self._keeps_spaces else text.rstrip()
        if certain:
            self._sink.events.append(TextDelta(self._gap + certain))
            self._gap = ""
        self._gap += text[len(certain) :]

    def _open_thought(self, end: str) -> None:
        self._state, self._stops = _State.THOUGHT, [end, *self._starts, *self._breaks]
        self._may_stop = _beginnings(self._stops, r"(?!)")
        self._gap = self._gap if self._said else ""
        self._strips, self._thought_gap = True, ""

    def _in_thought(self, final: bool) -> bool:
        text, stops = self._text, self._stops
        at, stop = min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=(-1, ""))
        if at < 0:
            certain = len(text) if final else len(text) - partial_end(text, stops)
            self._think(text[:certain])
            self._text = text[certain:]
            return False
        self._think(text[:at])
        self._text = text[at + len(stop) :]
        if stop in self._starts:  # it is open already
            return True
        self._thinks_first, self._gap, self._strips, self._state = False, "", True, _State.TEXT
        if stop in self._breaks:
            self._text = stop + self._text
        return True

    def _think(self, text: str) -> None:
        text = self._codes.without(text)
        text = text.lstrip() if self._strips else text
        if not text:
            return
        self._strips = False
        certain = text.rstrip()
        if certain:
            if self._thinks_first:
                self._thought.append(self._thought_gap + certain)
            self._sink.events.append(ReasoningDelta(self._thought_gap + certain))
            self._thought_gap = ""
        self._thought_gap += text[len(certain) :]

    def _open_calls(self, marker: str, calls: CallReader) -> None:
        self._state, self._calls = _State.CALLS, calls

    def _in_calls(self, final: bool) -> bool:
        assert self._calls is not None
        text, self._text = self._text, ""
        left = self._calls.feed(text, final)
        if left is None:
            return False
        self._state, self._calls = _State.TEXT, None
        self._show(left)
        self._text = left.rest
        return True

    def _show(self, left: Left) -> None:
        """What the calls have left. White space around them is nobody's, but that around what was no call is text."""
        shown = self._codes.without(left.shown)
        if self._bare and not self._said and shown:
            self._said = True
            self._sink.events.append(TextDelta(self._gap + shown))
            self._gap = ""
        elif left.has_failed:
            self._say(shown)
        else:
            self._gap, self._strips = "", True


def _beginnings(markers: Sequence[str], others: str) -> re.Pattern[str]:
    """Finds a character with which one of the markers begins, or what the expression `others` finds."""
    return re.compile("[" + "".join(re.escape(first) for first in {marker[0] for marker in markers}) + "]|" + others)
