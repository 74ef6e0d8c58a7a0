"""From token ids to the text a client sees: detokenising, stop strings, and the transcript's view of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentcache.models.text.replies.format import MarkerToken

_NO_MARKERS: Mapping[int, MarkerToken] = {}


class Detokenizer(Protocol):
    """Turns token ids into text, one at a time (`models/tokenizer.py`)."""

    text: str
    ends: list[int]

    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True)
class Shown:
    """Text that can be shown, and where in it which marker stands (see `report.Update`)."""

    text: str
    markers: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Generated:
    """What was generated and counts: the text as the client has it, and the tokens that lie wholly inside it."""

    text: str
    ids: Sequence[int]
    ends: Sequence[int]


class Output:
    """The text of one generation.

    Args:
        detokenizer: a fresh one.
        stop: strings that end the generation; none of it is shown, nor what could still become one.
        markers: tokens whose positions are told, by id.
        min_tokens: tokens in whose text no stop string is looked for.

    Attributes:
        stop_string: the one that has appeared.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        markers: Mapping[int, MarkerToken] = _NO_MARKERS,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._markers = markers
        self._min_tokens = min_tokens
        self._free = 0  # characters of the first `min_tokens` tokens
        self._placed: list[tuple[int, MarkerToken]] = []  # that are not shown yet, by their positions in the text
        self._stop = tuple(stop)
        self._hold = max((len(s) for s in self._stop), default=1) - 1
        self._ids: list[int] = []
        self._sent = 0
        self._end: int | None = None
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self._end is not None

    @property
    def holds_back(self) -> bool:
        """Whether there is text that is not shown yet: it could become a stop string."""
        return bool(self._stop) and self._sent < len(self._detokenizer.text)

    def add(self, token_id: int) -> Shown:
        """What can be shown now that `token_id` has come."""
        self._ids.append(token_id)
        searched_from = max(self._free, len(self._detokenizer.text) - self._hold)
        new_text = self._detokenizer.add(token_id)
        marker = self._markers.get(token_id)
        if marker is not None:
            end = len(self._detokenizer.text)
            self._placed.append((end - len(marker.name) if marker.is_shown else end, marker))
        elif not self._stop:
            return Shown(new_text)
        if not self._stop:
            return self._show_all(new_text)
        if len(self._ids) <= self._min_tokens:
            self._free = self._sent = len(self._detokenizer.text)
            return self._show_all(new_text)
        return self._show(searched_from, self._hold)

    def finish(self) -> Shown:
        """The rest, when no further token comes."""
        if not self._stop:
            return Shown(self._detokenizer.finish())
        searched_from = max(self._free, len(self._detokenizer.text) - self._hold)
        self._detokenizer.finish()
        return Shown("") if self.stopped else self._show(searched_from, 0)

    def _show_all(self, new_text: str) -> Shown:
        begin = len(self._detokenizer.text) - len(new_text)
        return Shown(new_text, self._markers_until(begin, len(self._detokenizer.text)))

    def _show(self, searched_from: int, hold: int) -> Shown:
        text = self._detokenizer.text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop, searched_from)) >= 0]
        if found:
            self._end, self.stop_string = min(found)
        until = self._end if self._end is not None else max(self._sent, len(text) - self._held(text, hold))
        begin, self._sent = self._sent, max(self._sent, until)
        return Shown(text[begin:until], self._markers_until(begin, until))

    def _markers_until(self, begin: int, until: int) -> tuple[tuple[int, str], ...]:
        """Those that stand wholly in the text that is shown now, which is the text from `begin` to `until`."""
        shown: list[tuple[int, str]] = []
        while self._placed:
            at, marker = self._placed[0]
            if at + (len(marker.name) if marker.is_shown else 0) > until:
                break
            shown.append((at - begin, marker.name))
            del self._placed[0]
        return tuple(shown)

    def _held(self, text: str, hold: int) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        lengths = range(min(hold, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)

    def generated(self) -> Generated:
        """What the transcript takes over: nothing behind a stop string, and no token that reaches into it."""
        text, ends = self._detokenizer.text, self._detokenizer.ends
        if self._end is None:
            return Generated(text, self._ids, ends)
        count = next((i for i, end in enumerate(ends) if end > self._end), len(ends))
        return Generated(text[: ends[count - 1] if count else 0], self._ids[:count], ends[:count])
