"""Text and its tokens side by side: what an agent's model has read and written, and what a tokenizer adds to it."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Kind = Literal["prompt", "generated"]
Span = tuple[str, int]


@dataclass(frozen=True)
class Encoding:
    """Tokens of a text.

    Args:
        ids: token ids.
        ends: character offsets at which the tokens end; they never fall, the last one is the text's length. A token
            that ends inside a character gets the end of the next token that does not, so that text and tokens may be
            cut at every offset in `ends`.
    """

    ids: Sequence[int]
    ends: Sequence[int]


@dataclass(frozen=True)
class Spelling:
    """The text of token ids that came without one: marked text, and where each token ends in it."""

    text: str
    ends: Sequence[int]


@dataclass
class Transcript:
    """What an agent's model has read and written, as text and as the exact tokens. Never changed in place.

    Args:
        text: marked text (see `models/tokenizer.py`).
        ids: token ids.
        ends: character offset into `text` at which each token ends; never falls; the last one is `len(text)`.
        spans: runs of tokens in order, each ("prompt" or "generated", number of tokens); they add up to `len(ids)`.
    """

    text: str
    ids: array[int]
    ends: array[int]
    spans: tuple[Span, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def empty(cls) -> Transcript:
        return cls("", array("I"), array("I"), ())

    def cut(self, num_tokens: int) -> Transcript:
        """The first `num_tokens` tokens and the text they cover.

        Cut where a token ends cleanly: of tokens that end together, as those of one character, keep all or none.
        """
        ends = self.ends[:num_tokens]
        text = self.text[: ends[-1]] if ends else ""
        return Transcript(text, self.ids[:num_tokens], ends, self._cut_spans(num_tokens))

    def extended(self, text: str, ids: Iterable[int], ends: Iterable[int], kind: Kind) -> Transcript:
        """This transcript with `text` behind it. `ends` are offsets into the added `text`, one per id."""
        offset = len(self.text)
        more_ids = array("I", ids)
        more_ends = array("I", (offset + end for end in ends))
        spans = _join_spans(self.spans, ((kind, len(more_ids)),))
        return Transcript(self.text + text, self.ids + more_ids, self.ends + more_ends, spans)

    def generated_ranges(self) -> list[tuple[int, int]]:
        """Where generated text begins and ends, in characters."""
        ranges, first = [], 0
        for kind, count in self.spans:
            begin, end = self.ends[first - 1] if first else 0, self.ends[first + count - 1]
            first += count
            if kind == "generated" and begin < end:
                ranges.append((begin, end))
        return ranges

    def _cut_spans(self, num_tokens: int) -> tuple[Span, ...]:
        stops = list(accumulate((count for _, count in self.spans), initial=0))
        whole = max(bisect_right(stops, num_tokens) - 1, 0)
        rest = num_tokens - stops[whole]
        return self.spans[:whole] + (((self.spans[whole][0], rest),) if rest and whole < len(self.spans) else ())


def _join_spans(left: tuple[Span, ...], right: Iterable[Span]) -> tuple[Span, ...]:
    """Spans of two neighbours; empty ones go, equal neighbours become one."""
    joined: list[Span] = []
    for kind, count in (*left, *right):
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + count)
        elif count:
            joined.append((kind, count))
    return tuple(joined)
