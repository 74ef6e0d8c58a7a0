"""Encoding of messages: int32 words, with a length before each list and text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Self


class WordWriter:
    def __init__(self) -> None:
        self._words = array("i")

    def put(self, *numbers: int) -> None:
        self._words.extend(numbers)

    def put_list(self, numbers: Sequence[int]) -> None:
        self._words.append(len(numbers))
        self._words.extend(numbers)

    def put_bytes(self, data: bytes) -> None:
        self._words.append(len(data))
        self._words.frombytes(data + bytes(-len(data) % 4))

    def put_text(self, text: str) -> None:
        self.put_bytes(text.encode())

    def put_texts(self, texts: Iterable[str]) -> None:
        self.put_text("\n".join(texts))

    @property
    def bytes(self) -> bytes:
        return self._words.tobytes()


class WordReader:
    def __init__(self, data: bytes) -> None:
        self._words = array("i")
        self._words.frombytes(data)
        self._next = 0

    @property
    def is_at_end(self) -> bool:
        return self._next == len(self._words)

    def get(self) -> int:
        self._next += 1
        return self._words[self._next - 1]

    def get_list(self) -> list[int]:
        return self._take(self.get()).tolist()

    def get_bytes(self) -> bytes:
        length = self.get()
        return self._take(-(-length // 4)).tobytes()[:length]

    def get_text(self) -> str:
        return self.get_bytes().decode()

    def get_texts(self) -> list[str]:
        return [text for text in self.get_text().split("\n") if text]

    def _take(self, count: int) -> array[int]:
        self._next += count
        return self._words[self._next - count : self._next]


@dataclass(frozen=True)
class Numbers:
    """A command with integer fields only."""

    def put(self, words: WordWriter) -> None:
        words.put(*astuple(self))

    @classmethod
    def get(cls, words: WordReader) -> Self:
        make: Any = cls  # subclasses have fields
        told: Self = make(*(words.get() for _ in fields(cls)))
        return told
