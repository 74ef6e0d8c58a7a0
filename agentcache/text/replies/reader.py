"""Streaming parser for reasoning, text and calls of replies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from math import inf
from typing import Protocol

from agentcache.api.model import HARMONY, ReplyFormat
from agentcache.api.request import Reading
from agentcache.text.marks import Codes, Placed, any_of
from agentcache.text.replies.calls import SPACE, CallReader, CallSink, Tools, partial_end
from agentcache.text.replies.dialects import DIALECTS, NO_CALLS, Dialect, DialectParts, bare_object
from agentcache.text.replies.events import Event, ReasoningDelta, TextDelta, Zone, Zones
from agentcache.text.replies.harmony import HarmonyReader

# See `MarkedReader`.
DOUBTED, DOUBTED_UNTHOUGHT = 120, 400


class ReplyReader(Protocol):
    """Parser for one reply.

    `is_doubtful`: streamed text may be reasoning. `thought_ends`: strings that end the current reasoning; None outside
    it, or if its end may have begun.
    """

    is_doubtful: bool

    @property
    def num_calls(self) -> int: ...

    @property
    def thought_ends(self) -> Sequence[str] | None: ...

    def begin(self, prompt_end: str) -> None:
        """Take the marked prompt's end, which may open reasoning or calls."""

    def add(self, text: str, placed: Sequence[Placed] = ()) -> list[Event]:
        """Parse more text; `placed`: its marker tokens' offsets and names."""

    def finish(self, *, cut_off: bool) -> list[Event]:
        """End the reply; `cut_off` if the model did not end it."""

    def take_zones(self) -> list[Zone]:
        """Return the zones decided since the last call."""


def open_reader(form: ReplyFormat, tools: Tools | None, *, thoughts: bool, whole: bool = False) -> ReplyReader:
    """Create a parser; without `tools`, calls stay text. `whole`: events are used only at the end."""
    if form.dialect == HARMONY:
        return HarmonyReader(form, tools)
    dialect = DIALECTS.get(form.dialect or "") if tools is not None else None
    pairs = form.thoughts if thoughts else ()
    if dialect is None and not pairs:
        return PlainReader()
    return MarkedReader(form, dialect, tools or Tools(), pairs, whole=whole)


def read_as(reading: Reading, *, whole: bool = False) -> ReplyReader:
    tools = None if reading.tools is None else Tools(reading.tools)
    return open_reader(reading.form, tools, thoughts=reading.thoughts, whole=whole)


class PlainReader:
    num_calls = 0
    is_doubtful = False
    thought_ends = None

    def begin(self, prompt_end: str) -> None:
        return None

    def add(self, text: str, placed: Sequence[Placed] = ()) -> list[Event]:
        return [TextDelta(text)] if text else []

    def finish(self, *, cut_off: bool) -> list[Event]:
        return []

    def take_zones(self) -> list[Zone]:
        raise NotImplementedError("all of the text is said")


class _State(Enum):
    TEXT = auto()
    THOUGHT = auto()
    CALLS = auto()


class MarkedReader:
    """Parser for replies with markers around reasoning and calls; drops white space next to these.

    Some models close reasoning twice: the last closing marker before a call counts. A stream holds `DOUBTED` characters
    after each (`DOUBTED_UNTHOUGHT` after empty reasoning), and ignores later ones.
    """

    def __init__(
        self,
        form: ReplyFormat,
        dialect: Dialect | None,
        tools: Tools,
        pairs: Sequence[tuple[str, str]],
        *,
        whole: bool = False,
    ) -> None:
        dialect = dialect or NO_CALLS
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
        # These begin a call in unclosed reasoning, too.
        self._breaks = [marker for marker in self._opens if len(marker) == 1]
        self._thinks_first = form.thinks_first and bool(pairs)
        self._state = _State.TEXT
        self._text = ""  # unread
        self._gap = ""  # white space
        self._strips = False
        self._said = False
        self._thought: list[str] = []  # reasoning without an opening marker
        self._stops: list[str] = []  # of the current reasoning, its own end first
        self._may_stop = self._may_begin
        self._thought_gap = ""
        self._calls: CallReader | None = None
        self._undecided: list[str] = []
        self._num_before = 0
        self._zones = Zones(codes.shown)
        self._is_whole = whole and bool(pairs)
        self._doubted = inf if self._is_whole else 0.0  # characters still to hold
        self._held: list[tuple[str, bool]] = []  # possible reasoning; True: never shown
        self._has_closed = self._has_thought = self.is_doubtful = False

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    @property
    def thought_ends(self) -> Sequence[str] | None:
        is_clear = self._state is _State.THOUGHT and self._codes.uncoded([self._text])
        return self._codes.uncoded(self._stops) if is_clear else None

    def begin(self, prompt_end: str) -> None:
        end = prompt_end.rstrip(SPACE)
        opened = next((index for index, start in enumerate(self._plain_starts) if end.endswith(start)), None)
        if opened is not None:
            self._open_thought(list(self._starts.values())[opened])
            self._thinks_first = False
        elif (
            marker := next((each for each in self._opens if end.endswith(self._codes.spelled(each))), None)
        ) is not None:
            self._open_calls("", self._opens[marker](self._parts))
            self._thinks_first = False
        elif self._thinks_first and not any(end.endswith(self._codes.spelled(close)) for close in self._ends):
            self._open_thought(next(iter(self._starts.values())))
        else:
            self._thinks_first = False

    def add(self, text: str, placed: Sequence[Placed] = ()) -> list[Event]:
        text = self._codes.coded(text, placed)
        if self._state is _State.TEXT and not self._text and not self._doubted and self._is_plain(text):
            self._strips = False
            gap, self._gap = self._gap, ""
            self._zones.add(text, is_said=True)
            return [TextDelta(gap + text)]
        if self._state is _State.THOUGHT and not self._text and not self._may_stop.search(text):
            self._think(text)
            return self._sink.take()
        self._text += text
        self._read(final=False)
        return self._sink.take()

    def finish(self, *, cut_off: bool) -> list[Event]:
        self._read(final=True)
        self._resolve()
        if self._thinks_first and self._state is _State.THOUGHT and not cut_off:
            # Reasoning without any marker was the answer.
            self._show_text("".join(self._thought))
        if self._state is _State.TEXT and self._gap:
            self._sink.events.append(TextDelta(self._gap))
        return self._sink.take()

    def take_zones(self) -> list[Zone]:
        return self._zones.take()

    def _is_plain(self, text: str) -> bool:
        # No marker begins in it and all its white space counts.
        if not text or self._may_begin.search(text) is not None:
            return False
        if not self._said:
            self._said = not self._bare and not text[0].isspace()
            return self._said
        return not (self._strips and text[0].isspace())

    def _read(self, *, final: bool) -> None:
        steps = {_State.TEXT: self._in_text, _State.THOUGHT: self._in_thought, _State.CALLS: self._in_calls}
        while steps[self._state](final):
            continue

    # Each step returns whether to continue.

    def _in_text(self, final: bool) -> bool:
        text = self._text
        if self._bare and not self._has_text() and text.lstrip(SPACE).startswith("{"):
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
            self._resolve(is_thought=self._has_closed)
            self._skip(marker)
            self._open_thought(self._starts[marker])
        elif marker in self._opens:
            self._open_calls(marker, self._opens[marker](replace(self._parts, marker=self._codes.shown(marker))))
        elif marker in self._ends:
            self._resolve(is_thought=True)
            self._skip(marker)
            self._close_thought()
        else:
            self._skip(marker)
        return True

    def _has_text(self) -> bool:
        return self._said or any(not is_skipped and not piece.isspace() for piece, is_skipped in self._held)

    def _skip(self, text: str) -> None:
        if self._held:
            self._held.append((text, True))
        else:
            self._zones.add(text, is_said=False)

    def _resolve(self, *, is_thought: bool = False) -> None:
        held, self._held = self._held, []
        for piece, is_skipped in held:
            self._zones.add(piece, is_said=not (is_skipped or is_thought))
        text = "".join(piece for piece, is_skipped in held if not is_skipped)
        if not text:
            return
        if is_thought:
            self.is_doubtful = True
            self._thought_gap, self._strips = "\n" if self._has_thought else "", True
            self._show_thought(text)
        else:
            self._doubted = 0.0
            self._show_text(text)

    def _close_thought(self) -> None:
        closes = self._state is _State.THOUGHT or self._doubted or not self._said
        if closes or self.num_calls:
            self._strips, self._gap = True, ""
        self._state, self._has_closed = _State.TEXT, True
        self._doubted = 0.0
        if closes and not self.num_calls:
            self._doubted = inf if self._is_whole else float(DOUBTED if self._has_thought else DOUBTED_UNTHOUGHT)

    def _may_be_longer(self, text: str) -> bool:
        return any(len(marker) > len(text) and marker.startswith(text) for marker in self._markers)

    def _say(self, text: str) -> None:
        if not self._doubted:
            self._zones.add(text, is_said=True)
            self._show_text(text)
        elif text:
            self._held.append((text, False))
            self._doubted -= len(text)
            if self._doubted <= 0:
                self._resolve()

    def _show_text(self, text: str) -> None:
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
        if stop not in self._breaks:
            self._skip(stop)
        if stop in self._starts:
            return True
        self._thinks_first = False
        self._close_thought()
        if stop in self._breaks:
            self._open_calls(stop, self._opens[stop](self._parts))
        return True

    def _think(self, text: str) -> None:
        self._zones.add(text, is_said=False)
        self._show_thought(text)

    def _show_thought(self, text: str) -> None:
        text = self._codes.without(text)
        text = text.lstrip() if self._strips else text
        if not text:
            return
        self._strips = False
        certain = text.rstrip()
        if certain:
            self._has_thought = True
            if self._thinks_first:
                self._thought.append(self._thought_gap + certain)
            self._sink.events.append(ReasoningDelta(self._thought_gap + certain))
            self._thought_gap = ""
        self._thought_gap += text[len(certain) :]

    def _open_calls(self, marker: str, calls: CallReader) -> None:
        self._state, self._calls, self._undecided = _State.CALLS, calls, [marker]
        self._num_before = self.num_calls

    def _in_calls(self, final: bool) -> bool:
        assert self._calls is not None
        text, self._text = self._text, ""
        self._undecided.append(text)
        events = self._sink.take()
        left = self._calls.feed(text, final)
        own, self._sink.events = self._sink.events, events
        is_call = self.num_calls > self._num_before
        if is_call:
            self._resolve()
            self._doubted = 0.0
        self._sink.events += own
        if left is None and not is_call:
            return False
        read, self._undecided = "".join(self._undecided), []
        if left is None:
            self._skip(read)
            return False
        self._state, self._calls, self._text = _State.TEXT, None, left.rest
        # Decoded: `left` may spell a marker out.
        read, given_back = self._codes.shown(read), self._codes.shown(left.shown + left.rest)
        self._skip(read[: max(0, len(read) - len(given_back))])
        self._zones.pass_over(given_back[: max(0, len(given_back) - len(read))])
        if left.has_failed:
            self._say(left.shown)
        else:
            self._gap, self._strips = "", True
        return True


def _beginnings(markers: Sequence[str], others: str) -> re.Pattern[str]:
    return re.compile("[" + "".join(re.escape(first) for first in {marker[0] for marker in markers}) + "]|" + others)
