"""Zones of a reply's text: answer text ("said"), or reasoning, calls and markers."""

from __future__ import annotations

from collections.abc import Callable

Zone = tuple[int, bool]
"""A number of characters of a reply's text, and whether they are said."""


class Zones:
    """Collects a reply's zones in order; `shown` decodes coded text (`Codes`)."""

    def __init__(self, shown: Callable[[str], str]) -> None:
        self._shown = shown
        self._zones: list[Zone] = []
        self._passed_over = 0  # characters

    def add(self, coded: str, *, is_said: bool) -> None:
        length = self._length(coded)
        over = min(length, self._passed_over)
        length, self._passed_over = length - over, self._passed_over - over
        if not length:
            return
        if self._zones and self._zones[-1][1] is is_said:
            length += self._zones.pop()[0]
        self._zones.append((length, is_said))

    def pass_over(self, coded: str) -> None:
        """Skip `coded` at the start of the next text: it is in a zone already."""
        self._passed_over += self._length(coded)

    def _length(self, coded: str) -> int:
        return len(coded) if coded.isascii() else len(self._shown(coded))

    def take(self) -> list[Zone]:
        zones, self._zones = self._zones, []
        return zones
