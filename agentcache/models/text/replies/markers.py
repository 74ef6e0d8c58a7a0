"""Markers on token ids: a marker that is a token becomes a character that no text has, so that no text is a marker."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from agentcache.models.text.json_values import json_string
from agentcache.models.text.marks import any_of

_FIRST = 0x10F000  # of a plane for private use; what is above belongs to `Marks`
_ANY = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + 0x7FF)}]")

Placed = tuple[int, str]


class Codes:
    """Characters for markers.

    Args:
        tokens: markers that are single tokens, with whether the token is part of the text that clients see.
    """

    def __init__(self, tokens: Iterable[tuple[str, bool]]) -> None:
        self._shown = dict(tokens)
        self._of = {name: chr(_FIRST + index) for index, name in enumerate(self._shown)}
        self._name = {character: name for name, character in self._of.items()}
        self._names = any_of(self._of)

    def code(self, marker: str) -> str:
        """A marker, or a text with markers in it, as it stands in coded text."""
        return self._names.sub(lambda found: self._of[found[0]], marker) if self._of else marker

    def uncoded(self, markers: Iterable[str]) -> list[str]:
        """Those of coded markers that have no token in them: generated text spells them."""
        return [marker for marker in markers if self.without(marker) == marker]

    def coded(self, text: str, placed: Sequence[Placed]) -> str:
        """Generated text as coded text.

        Args:
            placed: where in the text which token stands.
        """
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
        """Coded text as clients may see it where a marker means nothing."""
        return coded if coded.isascii() else _ANY.sub(lambda found: self._spelled(found[0], hides=True), coded)

    def spelled(self, coded: str) -> str:
        """Coded text with all markers as their strings."""
        return coded if coded.isascii() else _ANY.sub(lambda found: self._spelled(found[0], hides=False), coded)

    def in_json(self, coded: str) -> str:
        """Coded JSON text with all markers in its strings as their strings: a file may be about them."""
        if coded.isascii():
            return coded
        quoted = lambda found: json_string(self._spelled(found[0], hides=False), ensure_ascii=False)  # noqa: E731
        return _ANY.sub(lambda found: quoted(found)[1:-1], coded)

    def without(self, coded: str) -> str:
        """Coded text without any marker that is a token."""
        return coded if coded.isascii() else _ANY.sub("", coded)

    def _spelled(self, character: str, *, hides: bool) -> str:
        name = self._name.get(character, "")
        return "" if hides and not self._shown.get(name) else name


def _clean(text: str) -> str:
    return text if text.isascii() else _ANY.sub("\ufffd", text)


Code = Callable[[str], str]
