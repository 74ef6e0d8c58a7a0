from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentcache.api.model import MarkerToken
from agentcache.text.marks import Placed
from agentcache.text.replies.stop_strings import FoundStop, StopSearch

_NO_MARKERS: Mapping[int, MarkerToken] = {}


class Detokenizer(Protocol):
    """Converts token ids to text."""

    ends: list[int]

    @property
    def text(self) -> str: ...

    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True)
class Shown:
    """Text to send, with marker positions."""

    text: str
    markers: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Generated:
    text: str
    ids: Sequence[int]
    ends: Sequence[int]


class Output:
    """The text of one request, at constant cost per token. Stops in the first `min_tokens` do not count."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopSearch | None = None,
        markers: Mapping[int, MarkerToken] = _NO_MARKERS,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._markers = markers
        self._min_tokens = min_tokens
        self._placed: list[tuple[int, MarkerToken]] = []  # not sent yet, with positions in the text
        self._stops = stops
        self._ids: list[int] = []
        self._length = 0
        self._held = ""  # may begin a stop string
        self._end: int | None = None
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self._end is not None

    @property
    def holds_back(self) -> bool:
        return bool(self._held)

    def add(self, token_id: int) -> Shown:
        self._ids.append(token_id)
        new_text = self._detokenizer.add(token_id)
        self._length += len(new_text)
        marker = self._markers.get(token_id)
        if marker is not None:
            self._placed.append((self._length - len(marker.name) if marker.is_shown else self._length, marker))
        elif self._stops is None:
            return Shown(new_text)
        if self._stops is None:
            return Shown(new_text, self._markers_until(self._length - len(new_text), self._length))
        if marker is None and not self._held and not self._placed and len(self._ids) > self._min_tokens:
            found = self._stops.feed(new_text)
            if found is None and not self._stops.num_held:
                return Shown(new_text)
            return self._cut(self._stops, new_text, found, is_last=False)
        placed = () if marker is None else self._placed_in(new_text)
        if len(self._ids) <= self._min_tokens:
            self._stops.skip(new_text, placed)
            return Shown(new_text, self._markers_until(self._length - len(new_text), self._length))
        return self._show(self._stops, new_text, placed, is_last=False)

    def finish(self) -> Shown:
        new_text = self._detokenizer.finish()
        if self._stops is None:
            return Shown(new_text)
        self._length += len(new_text)
        return Shown("") if self.stopped else self._show(self._stops, new_text, (), is_last=True)

    def _placed_in(self, new_text: str) -> Sequence[Placed]:
        at, marker = self._placed[-1]
        return ((at - self._length + len(new_text), marker.name),)

    def _show(self, stops: StopSearch, new_text: str, placed: Sequence[Placed], *, is_last: bool) -> Shown:
        return self._cut(stops, new_text, stops.feed(new_text, placed, is_last=is_last), is_last=is_last)

    def _cut(self, stops: StopSearch, new_text: str, found: FoundStop | None, *, is_last: bool) -> Shown:
        begin = self._length - len(new_text) - len(self._held)
        self._held += new_text
        if found is not None:
            self._end, self.stop_string = found.at, found.string
            until = found.at
        else:
            until = max(begin, self._length - (0 if is_last else stops.num_held))
        text, self._held = self._held[: until - begin], self._held[until - begin :]
        return Shown(text, self._markers_until(begin, until))

    def _markers_until(self, begin: int, until: int) -> tuple[tuple[int, str], ...]:
        shown: list[tuple[int, str]] = []
        while self._placed:
            at, marker = self._placed[0]
            if at + (len(marker.name) if marker.is_shown else 0) > until:
                break
            shown.append((at - begin, marker.name))
            del self._placed[0]
        return tuple(shown)

    def generated(self) -> Generated:
        """Text and tokens before a stop string, without a token that reaches into it."""
        text, ends = self._detokenizer.text, self._detokenizer.ends
        if self._end is None:
            return Generated(text, self._ids, ends)
        count = next((i for i, end in enumerate(ends) if end > self._end), len(ends))
        return Generated(text[: ends[count - 1] if count else 0], self._ids[:count], ends[:count])
