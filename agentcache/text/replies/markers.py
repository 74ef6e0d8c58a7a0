"""Coded text: marker tokens become private-use characters, so ordinary text cannot imitate them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from agentcache.text.json_values import json_string
from agentcache.text.marks import any_of

_FIRST = 0x10F000  # private use; `Marks` begins above this range, unless it has over 2,046 tokens
_ANY = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + 0x7FF)}]")

Placed = tuple[int, str]


class Codes:
    """Encoder and decoder of marker tokens.

    Args:
        tokens: each marker token's name, and whether clients see it in text.
    """

    def __init__(self, tokens: Iterable[tuple[str, bool]]) -> None:
        self._shown = dict(tokens)
        self._of = {name: chr(_FIRST + index) for index, name in enumerate(self._shown)}
        self._name = {character: name for name, character in self._of.items()}
        self._names = any_of(self._of)

    def code(self, marker: str) -> str:
        """Encode the markers in a text."""
        return self._names.sub(lambda found: self._of[found[0]], marker) if self._of else marker

    def uncoded(self, markers: Iterable[str]) -> list[str]:
        """Return the markers without marker tokens: generated text spells them out."""
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
        """Decode to the text that clients see."""
        return coded if coded.isascii() else _ANY.sub(lambda found: self._spelled(found[0], hides=True), coded)

    def spelled(self, coded: str) -> str:
        return coded if coded.isascii() else _ANY.sub(lambda found: self._spelled(found[0], hides=False), coded)

    def in_json(self, coded: str) -> str:
        """Decode JSON text with all markers as their names: arguments may quote markers."""
        if coded.isascii():
            return coded

        def quoted(found: re.Match[str]) -> str:
            return json_string(self._spelled(found[0], hides=False), ensure_ascii=False)[1:-1]

        return _ANY.sub(quoted, coded)

    def without(self, coded: str) -> str:
        return coded if coded.isascii() else _ANY.sub("", coded)

    def _spelled(self, character: str, *, hides: bool) -> str:
        name = self._name.get(character, "")
        return "" if hides and not self._shown.get(name) else name


def _clean(text: str) -> str:
    return text if text.isascii() else _ANY.sub("\ufffd", text)


Code = Callable[[str], str]
