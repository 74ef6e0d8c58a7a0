"""Stop strings in a reply, outside what the model thinks and the calls that it makes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentcache.models.text.marks import any_of
from agentcache.models.text.replies.markers import Placed
from agentcache.models.text.replies.reader import ReplyReader
from agentcache.models.text.stop_strings import FoundStop, StopStrings


class StopSearch:
    """Looks for stop strings in a text that comes in pieces. Positions are in the whole text.

    Args:
        reader: a fresh one of the reply, which has been told the prompt's end; None where all of the text counts.

    A string counts where all of it is said (`ReplyReader.take_zones`). The reader costs more than the automaton: it
    reads on only when a string has been found anywhere, and then up to where it is known what that is a part of. In a
    thought nothing is looked for until it may end.
    """

    def __init__(self, stops: StopStrings, reader: ReplyReader | None) -> None:
        self._stops = stops
        self._reader = reader
        self._state = 0  # over all of the text
        self._length = 0
        self._unread: list[str] = []  # by the reader
        self._read_length = 0
        self._placed: list[Placed] = []  # in that
        self._waits = False  # a string has been found, and it is not known yet what it is a part of
        self._zoned = 0  # characters that are in zones
        self._undecided = ""  # text behind these that the reader has read
        self._said = 0  # state over what is said, up to `_zoned`
        self._from = 0  # no string counts that begins in front
        self._thought_end: re.Pattern[str] | None = None  # of the thought that is at work
        self._longest_end = 0
        self._tail = ""  # of the thought, in which its end may begin

    @property
    def num_held(self) -> int:
        """Characters at the text's end that may be a stop string, or the beginning of one."""
        if self._waits:
            return self._stops.num_held(self._said) + len(self._undecided)
        return self._stops.num_held(self._state)

    def skip(self, text: str, placed: Sequence[Placed] = ()) -> None:
        """Text in which nothing counts."""
        self._placed += [(self._length - self._read_length + at, name) for at, name in placed]
        self._unread.append(text)
        self._length += len(text)
        self._from = self._length
        self._thought_end = None

    def feed(self, text: str, placed: Sequence[Placed] = (), *, is_last: bool = False) -> FoundStop | None:
        """Take more text. The stop string that ends it, and where that begins.

        Args:
            placed: where in it which marker stands.
            is_last: whether nothing follows.
        """
        if self._thought_end is not None:
            if not placed and self._goes_on(self._thought_end, text):
                return None
            self._thought_end = None
        if placed:
            self._placed += [(self._length - self._read_length + at, name) for at, name in placed]
        if self._reader is not None:
            self._unread.append(text)
        self._length += len(text)
        self._state, found = self._stops.feed(self._state, text)
        if found is None and not self._waits:
            return None
        if self._reader is None:
            return found and FoundStop(self._length - len(text) + found.at, found.string)
        return self._read(self._reader, is_last=is_last)

    def _read(self, reader: ReplyReader, *, is_last: bool) -> FoundStop | None:
        text = "".join(self._unread)
        reader.add(text, self._placed)
        if is_last:
            reader.finish(cut_off=False)
        self._unread, self._read_length, self._placed = [], self._length, []
        undecided, at = self._undecided + text, 0
        found: FoundStop | None = None
        for length, is_said in reader.take_zones():
            found = found or self._look(undecided[at : at + length], is_said=is_said)
            at += length
            self._zoned += length
        self._undecided = undecided[at:]
        self._waits = bool(self._undecided)
        self._begin_thought(reader)
        return found

    def _begin_thought(self, reader: ReplyReader) -> None:
        """Look for nothing more until the thought at work, if one is, may end."""
        ends = reader.thought_ends
        if ends is not None:
            self._thought_end, self._longest_end = any_of(ends), max(map(len, ends), default=0)
            self._state, self._waits, self._tail = 0, False, self._undecided

    def _goes_on(self, end: re.Pattern[str], text: str) -> bool:
        """Whether text that has no marker in it goes on with the thought; it is taken then."""
        tail = self._tail + text
        if end.search(tail) is not None:
            return False
        self._tail = tail[1 - self._longest_end :] if self._longest_end > 1 else ""
        self._unread.append(text)
        self._length += len(text)
        return True

    def _look(self, piece: str, *, is_said: bool) -> FoundStop | None:
        """Look through the next zone. What has begun in front of it counts only if both are said."""
        if not is_said:
            self._said = 0
            return None
        skipped = min(len(piece), max(0, self._from - self._zoned))
        self._said, found = self._stops.feed(self._said, piece[skipped:])
        return found and FoundStop(self._zoned + skipped + found.at, found.string)
