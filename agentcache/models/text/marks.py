"""Marked text: special-token strings that are text, not control, stand as one private-use character each.

A user may write "<|im_end|>" in a message, and a model may spell it in plain pieces. In marked text only control tokens
appear as their strings; everywhere else such a string is a mark, so that no later step can mistake one for the other.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_FIRST = 0x10F800
_FIRST_OF_MANY = 0x100000
_LAST = 0x10FFFD


@dataclass(frozen=True)
class MarkedEnds:
    """Marked text and where tokens end in it."""

    text: str
    ends: list[int]


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Finds each of `strings`, the longest first; of none, nothing."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class Marks:
    """Translates between plain and marked text.

    Args:
        specials: special-token strings; the i-th has the i-th mark.
    """

    def __init__(self, specials: Sequence[str]) -> None:
        first = _FIRST if len(specials) <= _LAST - _FIRST + 1 else _FIRST_OF_MANY
        self.mark_of = {special: chr(first + index) for index, special in enumerate(specials)}
        self._special_of = {mark: special for special, mark in self.mark_of.items()}
        self._reserved = re.compile(f"[{chr(first)}-{chr(_LAST)}]")
        self._special = any_of(specials)

    def mark(self, text: str) -> str:
        """Plain text as marked text. Characters that happen to be marks already become U+FFFD."""
        return self._special.sub(lambda found: self.mark_of[found[0]], self.clean(text))

    def unmark(self, text: str) -> str:
        """Marked text as plain text."""
        return self._reserved.sub(lambda found: self._special_of.get(found[0], found[0]), text)

    def clean(self, text: str) -> str:
        """Plain text without characters of the reserved range; special-token strings stay what they are."""
        return self._reserved.sub("\ufffd", text)

    def are_in(self, text: str) -> bool:
        return self._reserved.search(text) is not None

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Every mark in marked text."""
        return self._reserved.finditer(text)

    def marked_ends(self, text: str, ends: Sequence[int]) -> MarkedEnds:
        """Mark generated text. A token that ends inside a mark ends with the next token that does not."""
        marked = self.mark(text)
        if len(marked) == len(text):
            return MarkedEnds(marked, list(ends))
        offsets = MarkOffsets(self, marked)
        moved = [0] * len(ends)
        following = len(marked)
        for index in range(len(ends) - 1, -1, -1):
            low, high = offsets.low(ends[index]), offsets.high(ends[index])
            moved[index] = following = high if low == high else following
        return MarkedEnds(marked, moved)


class MarkOffsets:
    """Where offsets into the plain text lie in the marked text."""

    def __init__(self, marks: Marks, marked: str) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._marked_starts: list[int] = []
        grown = 0
        for found in marks.find(marked):
            length = len(marks.unmark(found[0]))
            self._marked_starts.append(found.start())
            self._starts.append(found.start() + grown)
            self._stops.append(found.start() + grown + length)
            grown += length - 1

    def low(self, offset: int) -> int:
        """`offset` in marked text; of one inside a mark, the mark's beginning."""
        return self._shifted(offset, 0)

    def high(self, offset: int) -> int:
        """`offset` in marked text; of one inside a mark, the mark's end."""
        return self._shifted(offset, 1)

    def _shifted(self, offset: int, side: int) -> int:
        last = bisect_left(self._starts, offset) - 1
        if last < 0:
            return offset
        into = offset - self._stops[last]
        return self._marked_starts[last] + (side if into < 0 else 1 + into)
