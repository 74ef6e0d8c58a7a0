"""Stop strings as one automaton (Aho and Corasick, 1975): constant cost per character."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

_CHARACTER_BITS = 21


@dataclass(frozen=True)
class FoundStop:
    """A stop string and its start in the piece that completes it; negative if earlier."""

    at: int
    string: str


class StopStrings:
    """Finds non-empty strings in a text that arrives in pieces. Immutable: the caller keeps the state.

    A state is the longest suffix of the text that is a prefix of a string; 0 for none. Of several matches in one piece,
    the earliest start wins, then the shortest.
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
        """Return how many trailing characters may begin a match."""
        return self._depth[state]

    def feed(self, state: int, text: str) -> tuple[int, FoundStop | None]:
        """Return the state after `text`, and the match in it."""
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
        # Breadth first: deeper states use these values.
        following: dict[int, list[tuple[int, int]]] = {}
        for key, state in self._next.items():
            following.setdefault(key >> _CHARACTER_BITS, []).append((key & (1 << _CHARACTER_BITS) - 1, state))
        waiting = deque([0])
        while waiting:
            parent = waiting.popleft()
            for character, state in following.get(parent, ()):
                self._shorter[state] = self._step(self._shorter[parent], character) if parent else 0
                self._found[state] = state if state in self._string_at else self._found[self._shorter[state]]
                waiting.append(state)


NO_STOPS = StopStrings(())


@lru_cache(maxsize=16)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    # Clients repeat them in every request.
    return StopStrings(strings) if strings else NO_STOPS
