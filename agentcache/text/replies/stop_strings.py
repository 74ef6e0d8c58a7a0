"""Stop strings: an automaton (Aho and Corasick, 1975) and the search in a reply."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agentcache.text.marks import Placed, any_of
from agentcache.text.replies.reader import ReplyReader

_CHARACTER_BITS = 21


@dataclass(frozen=True)
class FoundStop:
    """A stop string and its start in the piece that completes it, maybe negative."""

    at: int
    string: str


class StopStrings:
    """Finds non-empty strings in pieces of text; a piece's match with the first start wins, then the shortest.

    The caller keeps the state: the longest suffix that begins a string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: dict[int, int] = {}
        self._depth = [0]
        self._string_at: dict[int, str] = {}
        for string in strings:
            self._string_at[self._path(string)] = string
        self._shorter = [0] * len(self._depth)  # next shorter suffix
        self._found = [0] * len(self._depth)  # longest suffix that is a string
        self._link()
        firsts = {string[0] for string in self._string_at.values()}
        self._first = re.compile(f"[{''.join(map(re.escape, firsts))}]" if firsts else r"(?!)")

    def __bool__(self) -> bool:
        return bool(self._string_at)

    def num_held(self, state: int) -> int:
        return self._depth[state]

    def feed(self, state: int, text: str) -> tuple[int, FoundStop | None]:
        begin = 0
        if not state:
            first = self._first.search(text)
            if first is None:
                return 0, None
            begin = first.start()
        found: tuple[int, str] | None = None
        for index in range(begin, len(text)):
            state = self._step(state, ord(text[index]))
            ended = self._found[state]
            while ended:
                string = self._string_at[ended]
                at = index + 1 - len(string)
                found = (at, string) if found is None else min(found, (at, string))
                ended = self._found[self._shorter[ended]]
        return state, None if found is None else FoundStop(*found)

    def _step(self, state: int, character: int) -> int:
        following = self._next.get(state << _CHARACTER_BITS | character)
        while following is None and state:
            state = self._shorter[state]
            following = self._next.get(state << _CHARACTER_BITS | character)
        return following or 0

    def _path(self, string: str) -> int:
        state = 0
        for character in string:
            key = state << _CHARACTER_BITS | ord(character)
            if key not in self._next:
                self._next[key] = len(self._depth)
                self._depth.append(self._depth[state] + 1)
            state = self._next[key]
        return state

    def _link(self) -> None:
        following: dict[int, list[tuple[int, int]]] = {}
        for key, state in self._next.items():
            following.setdefault(key >> _CHARACTER_BITS, []).append((key & (1 << _CHARACTER_BITS) - 1, state))
        waiting = deque([0])  # breadth first: `_step` uses shorter suffixes
        while waiting:
            parent = waiting.popleft()
            for character, state in following.get(parent, ()):
                self._shorter[state] = self._step(self._shorter[parent], character) if parent else 0
                self._found[state] = state if state in self._string_at else self._found[self._shorter[state]]
                waiting.append(state)


NO_STOPS = StopStrings(())


@lru_cache(maxsize=16)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings) if strings else NO_STOPS


class StopSearch:
    """Incremental search for stop strings in answer text, positions from the reply's start.

    The slow reader runs only while a found string's zone is unknown; in reasoning, only its end is searched.
    """

    def __init__(self, stops: StopStrings, reader: ReplyReader | None) -> None:
        self._stops = stops
        self._reader = reader
        self._state = 0
        self._length = 0
        self._unread: list[str] = []
        self._read_length = 0
        self._placed: list[Placed] = []
        self._waits = False  # the zone of a found string is unknown
        self._zoned = 0
        self._undecided = ""  # text after the zones
        self._said = 0  # state over answer text up to `_zoned`
        self._from = 0  # first possible start of a string
        self._thought_end: re.Pattern[str] | None = None
        self._longest_end = 0
        self._tail = ""  # may begin the reasoning's end

    @property
    def num_held(self) -> int:
        """Number of final characters that may be or begin a stop string."""
        if self._waits:
            return self._stops.num_held(self._said) + len(self._undecided)
        return self._stops.num_held(self._state)

    def skip(self, text: str, placed: Sequence[Placed] = ()) -> None:
        """Take text in which no stop string counts."""
        self._placed += [(self._length - self._read_length + at, name) for at, name in placed]
        self._unread.append(text)
        self._length += len(text)
        self._from = self._length
        self._thought_end = None

    def feed(self, text: str, placed: Sequence[Placed] = (), *, is_last: bool = False) -> FoundStop | None:
        """Return the first stop string that counts. `placed`: as in `ReplyReader.add`."""
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
        ends = reader.thought_ends
        if ends is not None:
            self._thought_end, self._longest_end = any_of(ends), max(map(len, ends), default=0)
            self._state, self._waits, self._tail = 0, False, self._undecided

    def _goes_on(self, end: re.Pattern[str], text: str) -> bool:
        tail = self._tail + text
        if end.search(tail) is not None:
            return False
        self._tail = tail[1 - self._longest_end :] if self._longest_end > 1 else ""
        self._unread.append(text)
        self._length += len(text)
        return True

    def _look(self, piece: str, *, is_said: bool) -> FoundStop | None:
        if not is_said:
            self._said = 0
            return None
        skipped = min(len(piece), max(0, self._from - self._zoned))
        self._said, found = self._stops.feed(self._said, piece[skipped:])
        return found and FoundStop(self._zoned + skipped + found.at, found.string)
