"""Collects the rules of a Lark grammar and spells texts in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentcache.text.json_values import json_string
from agentcache.text.marks import any_of


class Rules:
    """Rules of one grammar; `ids` has the markers' token ids by name."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        self._names = any_of(ids)
        self.lines: list[str] = []

    def rule(self, source: str, attributes: str = "") -> str:
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {source}")
        return name

    def terminal(self, source: str) -> str:
        name = f"VALUE_{len(self.lines)}"
        self.lines.append(f"{name}: {source}")
        return name

    def spelled(self, text: str) -> str:
        return " ".join(map(element, self.pieces(text)))

    def pieces(self, text: str) -> Iterator[str | int]:
        done = 0
        for found in self._names.finditer(text):
            if found.start() > done:
                yield text[done : found.start()]
            yield self.ids[found[0]]
            done = found.end()
        if done < len(text):
            yield text[done:]


def element(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else literal(piece)


def literal(text: str) -> str:
    return json_string(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Escape a text for a regular expression: all but ASCII letters and digits as code points."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
