from __future__ import annotations

import sys
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Kind = Literal["prompt", "generated"]
Span = tuple[str, int]


@dataclass(frozen=True)
class Encoding:
    """Tokens of a text. `ends`: character offset of each token's end, after a character that it splits."""

    ids: Sequence[int]
    ends: Sequence[int]


@dataclass(frozen=True)
class Spelling:
    """Marked text of token ids, and where each ends."""

    text: str
    ends: Sequence[int]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TranscriptContent:
    text: str
    ids: array[int]
    ends: array[int]
    spans: tuple[Span, ...]

    @property
    def num_bytes(self) -> int:
        return sys.getsizeof(self.text) + sys.getsizeof(self.ids) + sys.getsizeof(self.ends) + 128 * len(self.spans)


class Transcript:
    """Marked text (`text/marks.py`) and exact tokens of an agent's context. Immutable.

    After `store_in`, the content can leave RAM; attributes then read the log. `ends` as in `Encoding`, the last is
    `len(text)`; `spans`: runs of ("prompt" or "generated", number of tokens).
    """

    __slots__ = ("_content", "_num_tokens", "_read", "_unowned", "num_chars", "num_spans")
    __hash__ = None  # type: ignore[assignment]  # compared by content

    def __init__(self, text: str, ids: array[int], ends: array[int], spans: tuple[Span, ...]) -> None:
        self._content: TranscriptContent | None = TranscriptContent(text, ids, ends, spans)
        self._num_tokens, self.num_chars, self.num_spans = len(ids), len(text), len(spans)
        self._read: Callable[[], TranscriptContent] | None = None
        self._unowned: Callable[[], TranscriptContent | None] = _nothing

    def __len__(self) -> int:
        return self._num_tokens

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transcript):
            return NotImplemented
        return self is other or (self._shape == other._shape and self.content() == other.content())

    def __repr__(self) -> str:
        return f"Transcript({self.content() if self.is_in_ram else len(self)})"

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self._num_tokens, self.num_chars, self.num_spans

    @property
    def text(self) -> str:
        return self.content().text

    @property
    def ids(self) -> array[int]:
        return self.content().ids

    @property
    def ends(self) -> array[int]:
        return self.content().ends

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.content().spans

    @property
    def is_in_ram(self) -> bool:
        return self._content is not None or self._unowned() is not None

    @property
    def is_kept(self) -> bool:
        return self._content is not None

    @property
    def is_stored(self) -> bool:
        return self._read is not None

    def content(self) -> TranscriptContent:
        """Read the content if it left RAM. Any thread. Raises StoreError."""
        content = self._content or self._unowned()
        if content is None:
            assert self._read is not None
            content = self._read()
            self._unowned = weakref.ref(content)
        return content

    def store_in(self, read: Callable[[], TranscriptContent]) -> None:
        """Set the log's reader, called on any thread."""
        self._read = read

    def leave_ram(self) -> None:
        """Keep stored content only while referenced elsewhere."""
        content = self._content
        if content is not None and self._read is not None:
            self._unowned = weakref.ref(content)
            self._content = None

    def copy(self) -> Transcript:
        copy = Transcript.__new__(Transcript)
        for name in Transcript.__slots__:
            setattr(copy, name, getattr(self, name))
        return copy

    @classmethod
    def empty(cls) -> Transcript:
        return cls("", array("I"), array("I"), ())

    def cut(self, num_tokens: int) -> Transcript:
        """Return the first tokens and their text. Do not cut between equal ends."""
        content = self.content()
        ends = content.ends[:num_tokens]
        text = content.text[: ends[-1]] if ends else ""
        return Transcript(text, content.ids[:num_tokens], ends, _cut_spans(content.spans, num_tokens))

    def extended(self, text: str, ids: Iterable[int], ends: Iterable[int], kind: Kind) -> Transcript:
        """Append `text`, with `ends` as offsets into it."""
        content = self.content()
        offset = len(content.text)
        more_ids = array("I", ids)
        more_ends = array("I", (offset + end for end in ends))
        spans = _join_spans(content.spans, ((kind, len(more_ids)),))
        return Transcript(content.text + text, content.ids + more_ids, content.ends + more_ends, spans)

    def generated_ranges(self) -> list[tuple[int, int]]:
        content = self.content()
        ranges, first, ends = list[tuple[int, int]](), 0, content.ends
        for kind, count in content.spans:
            begin, end = ends[first - 1] if first else 0, ends[first + count - 1]
            first += count
            if kind == "generated" and begin < end:
                ranges.append((begin, end))
        return ranges


def _cut_spans(spans: tuple[Span, ...], num_tokens: int) -> tuple[Span, ...]:
    stops = list(accumulate((count for _, count in spans), initial=0))
    whole = max(bisect_right(stops, num_tokens) - 1, 0)
    rest = num_tokens - stops[whole]
    return spans[:whole] + (((spans[whole][0], rest),) if rest and whole < len(spans) else ())


def _nothing() -> None:
    return None


def _join_spans(left: tuple[Span, ...], right: Iterable[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for kind, count in (*left, *right):
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + count)
        elif count:
            joined.append((kind, count))
    return tuple(joined)
