"""Marked text: private-use characters, marks, replace special-token strings that are no control tokens.

In generated replies, `Codes` replaces the tokens themselves.
"""

from __future__ import annotations

import marshal
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from os.path import commonprefix

from agentcache.errors import UnsupportedModel
from agentcache.text.json_values import json_string

_FIRST = 0x10F800
_FIRST_OF_MANY = 0x100000
_LAST = 0x10FFFD
_RESERVED_BYTES = re.compile(rb"\xf4[\x80-\xbf]{3}")  # plane 16 in UTF-8
NO_SEALS = marshal.dumps(((), (), "", (), ""))
# A template may join them, as in "<|" + role + "|>".
_ROLES = (
    *("system", "developer", "user", "human", "assistant", "model", "bot", "tool", "function", "ipython"),
    *("observation", "environment", "tool_response", "context", "documents"),
)
_FIRST_CODE = 0x10F000  # private use; `Marks` begins above, unless it has over 2,046 tokens
_ANY_CODE = re.compile(f"[{chr(_FIRST_CODE)}-{chr(_FIRST_CODE + 0x7FF)}]")
Placed = tuple[int, str]


@dataclass(frozen=True)
class MarkedEnds:
    text: str
    ends: list[int]


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern (no groups) for the longest of `strings`, as a trie."""
    distinct = sorted(set(strings) - {""})
    try:
        return re.compile(_alternatives(distinct, 0) if distinct else r"(?!)")
    except RecursionError:  # hundreds of strings, each a prefix of the next
        return re.compile("|".join(map(re.escape, sorted(distinct, key=len, reverse=True))))


def _alternatives(strings: Sequence[str], at: int) -> str:
    shared = at + len(commonprefix([strings[0][at:], strings[-1][at:]]))
    front = re.escape(strings[0][at:shared])
    longer = [string for string in strings if len(string) > shared]
    if not longer:
        return front
    ways = [_alternatives(list(group), shared) for _, group in groupby(longer, lambda string: string[shared])]
    either = f"(?:{'|'.join(ways)})"
    return f"{front}{either}?" if len(longer) < len(strings) else front + either


class Marks:
    """Converts between plain and marked text."""

    def __init__(self, specials: Sequence[str]) -> None:
        first = _FIRST if len(specials) <= _LAST - _FIRST + 1 else _FIRST_OF_MANY
        self.mark_of = {special: chr(first + index) for index, special in enumerate(specials)}
        self._special_of = {mark: special for special, mark in self.mark_of.items()}
        self._special = any_of(specials)
        self._special_bytes = re.compile(self._special.pattern.encode())
        self.seals = Seals(specials, first + len(specials))
        self._reserved = re.compile(f"[{min(chr(first), self.seals.lowest)}-{chr(_LAST)}]")

    def mark(self, text: str) -> str:
        """Convert plain text; reserved characters become U+FFFD."""
        return self._special.sub(lambda found: self.mark_of[found[0]], self.clean(text))

    def mark_unsealed(self, content: bytes | bytearray) -> str:
        """Convert a template's output; unsealed special-token strings become marks."""
        content = self.seals.join_halves(content)
        content = self._special_bytes.sub(lambda found: self.mark_of[found[0].decode()].encode(), content)
        return self.unsealed(content)

    def unsealed(self, content: bytes | bytearray) -> str:
        return self.seals.unseal(content).decode("utf-8", "surrogatepass")

    def unmark(self, text: str) -> str:
        return (
            text if text.isascii() else self._reserved.sub(lambda found: self._special_of.get(found[0], found[0]), text)
        )

    def clean(self, text: str) -> str:
        return text if text.isascii() else self._reserved.sub("\ufffd", text)

    def are_in(self, text: str) -> bool:
        return not text.isascii() and self._reserved.search(text) is not None

    def controls_in(self, text: str) -> list[str]:
        return self._special.findall(text)

    def find(self, text: str) -> Iterator[re.Match[str]]:
        return self._reserved.finditer(text)

    def marked_ends(self, text: str, ends: Sequence[int]) -> MarkedEnds:
        """Mark generated text. Token ends inside a mark move to the next one outside."""
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


class Seals:
    """Reserved characters that replace a template's own control tokens during a render; unsealed strings are none.

    Two more seals mark a token's halves around a role.
    """

    def __init__(self, specials: Sequence[str], free: int) -> None:
        first = _first_seal(len(specials), free)
        self.lowest = chr(first)
        self._seal_of = {special: chr(first + index) for index, special in enumerate(specials)}
        self._special_of = {seal.encode(): special.encode() for special, seal in self._seal_of.items()}
        self._opened, self._closed = chr(first + len(specials)), chr(first + len(specials) + 1)
        self._special = any_of(specials)
        halves = [half for special in specials for half in _halves(special)]
        self._openings = tuple(sorted({opening for opening, _, _ in halves}))
        self._closings = tuple(sorted({closing for _, _, closing in halves}))
        self._half = re.compile(any_of((self._opened, self._closed)).pattern.encode())
        roles = any_of({role for _, role, _ in halves}).pattern
        self._joined = re.compile(
            f"({any_of(self._openings).pattern}){self._opened}({roles}){self._closed}({any_of(self._closings).pattern})"
        )

    @cached_property
    def for_template(self) -> bytes:
        return marshal.dumps((tuple(self._seal_of.items()), self._openings, self._opened, self._closings, self._closed))

    def seal(self, text: str) -> str:
        return self._special.sub(lambda found: self._seal_of[found[0]], text)

    def unseal(self, content: bytes | bytearray) -> bytes:
        return _RESERVED_BYTES.sub(lambda found: self._special_of.get(found[0], found[0]), content)

    def join_halves(self, content: bytes | bytearray) -> bytes | bytearray:
        if not self._half.search(content):
            return content
        text = self._joined.sub(self._join, content.decode("utf-8", "surrogatepass"))
        return text.replace(self._opened, "").replace(self._closed, "").encode("utf-8", "surrogatepass")

    def _join(self, found: re.Match[str]) -> str:
        token = "".join(found.groups())
        return self._seal_of.get(token, token)


def _first_seal(num_specials: int, free: int) -> int:
    num_seals = num_specials + 2
    if free + num_seals - 1 <= _LAST:
        return free
    if _FIRST_OF_MANY + num_seals > free - num_specials:
        raise UnsupportedModel(f"The tokenizer has {num_specials} special tokens, which is too many.")
    return _FIRST_OF_MANY


def _halves(special: str) -> Iterator[tuple[str, str, str]]:
    for name in _ROLES:
        for role in (name, name.upper(), name.capitalize()):
            opening, found, closing = special.partition(role)
            if found and opening and closing:
                yield opening, role, closing


class MarkOffsets:
    """Converts plain to marked offsets; inside a mark, to its end (`high`) or start (`low`)."""

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
        return self._shifted(offset, 0)

    def high(self, offset: int) -> int:
        return self._shifted(offset, 1)

    def _shifted(self, offset: int, side: int) -> int:
        last = bisect_left(self._starts, offset) - 1
        if last < 0:
            return offset
        into = offset - self._stops[last]
        return self._marked_starts[last] + (side if into < 0 else 1 + into)


class Codes:
    """Encodes and decodes marker tokens. `tokens`: names, and whether clients see them in text."""

    def __init__(self, tokens: Iterable[tuple[str, bool]]) -> None:
        self._shown = dict(tokens)
        self._of = {name: chr(_FIRST_CODE + index) for index, name in enumerate(self._shown)}
        self._name = {character: name for name, character in self._of.items()}
        self._names = any_of(self._of)

    def code(self, marker: str) -> str:
        return self._names.sub(lambda found: self._of[found[0]], marker) if self._of else marker

    def uncoded(self, markers: Iterable[str]) -> list[str]:
        """Return the markers that generated text spells out."""
        return [marker for marker in markers if self.without(marker) == marker]

    def coded(self, text: str, placed: Sequence[Placed]) -> str:
        if not placed:
            return text if text.isascii() else _clean(text)
        parts: list[str] = []
        done = 0
        for at, name in placed:
            if name in self._of:
                parts += [_clean(text[done:at]), self._of[name]]
                done = at + len(name) if self._shown[name] else at
        return "".join([*parts, _clean(text[done:])])

    def shown(self, coded: str) -> str:
        return coded if coded.isascii() else _ANY_CODE.sub(lambda found: self._spelled(found[0], hides=True), coded)

    def spelled(self, coded: str) -> str:
        return coded if coded.isascii() else _ANY_CODE.sub(lambda found: self._spelled(found[0], hides=False), coded)

    def in_json(self, coded: str) -> str:
        """Decode JSON with markers as names: arguments may quote them."""
        if coded.isascii():
            return coded

        def quoted(found: re.Match[str]) -> str:
            return json_string(self._spelled(found[0], hides=False), ensure_ascii=False)[1:-1]

        return _ANY_CODE.sub(quoted, coded)

    def without(self, coded: str) -> str:
        return coded if coded.isascii() else _ANY_CODE.sub("", coded)

    def _spelled(self, character: str, *, hides: bool) -> str:
        name = self._name.get(character, "")
        return "" if hides and not self._shown.get(name) else name


def _clean(text: str) -> str:
    return text if text.isascii() else _ANY_CODE.sub("\ufffd", text)
