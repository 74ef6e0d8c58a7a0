"""Commands about arenas, and block bytes that workers keep under tickets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.blocks.block_tables import Copy
from agentcache.kv.block_layout import Array
from agentcache.ranks.words import Numbers, WordReader, WordWriter


@dataclass(frozen=True)
class GiveBack(Numbers):
    """Return free memory to the system."""

    code: ClassVar = 4


@dataclass(frozen=True)
class Fit:
    """Resize to these numbers of slots, by group."""

    code: ClassVar = 5
    capacities: Sequence[int]

    def put(self, words: WordWriter) -> None:
        words.put_list(self.capacities)

    @classmethod
    def get(cls, words: WordReader) -> Fit:
        return cls(words.get_list())


@dataclass(frozen=True)
class CopyBlocks:
    code: ClassVar = 6
    copies: Sequence[Copy]

    def put(self, words: WordWriter) -> None:
        words.put_list([number for copy in self.copies for number in (copy.group, copy.source, copy.target)])

    @classmethod
    def get(cls, words: WordReader) -> CopyBlocks:
        numbers = words.get_list()
        return cls([Copy(*numbers[start : start + 3]) for start in range(0, len(numbers), 3)])


@dataclass(frozen=True)
class TakeBytes(Numbers):
    """Keep the bytes of a slot's first `num_tokens` tokens."""

    code: ClassVar = 7
    ticket: int
    group: int
    slot: int
    num_tokens: int


@dataclass(frozen=True)
class PutBytes:
    """Write bytes under tickets into slots; ticket 0 means zeros."""

    code: ClassVar = 8
    group: int
    slots: Sequence[int]
    handles: Sequence[int]

    def put(self, words: WordWriter) -> None:
        words.put(self.group)
        words.put_list(self.slots)
        words.put_list(self.handles)

    @classmethod
    def get(cls, words: WordReader) -> PutBytes:
        return cls(words.get(), words.get_list(), words.get_list())


@dataclass(frozen=True)
class Forget:
    """Drop the bytes under these tickets."""

    code: ClassVar = 9
    handles: Sequence[int]

    def put(self, words: WordWriter) -> None:
        words.put_list(self.handles)

    @classmethod
    def get(cls, words: WordReader) -> Forget:
        return cls(words.get_list())


@dataclass(frozen=True)
class BringBytes:
    """Keep an imported block's bytes: uint8 [n] of ranks 1, 2, …; each keeps its own."""

    code: ClassVar = 18
    ticket: int
    parts: Sequence[Array]

    def put(self, words: WordWriter) -> None:
        words.put(self.ticket, len(self.parts))
        for part in self.parts:
            words.put_bytes(part.tobytes())

    @classmethod
    def get(cls, words: WordReader) -> BringBytes:
        ticket, count = words.get(), words.get()
        return cls(ticket, [np.frombuffer(words.get_bytes(), np.uint8) for _ in range(count)])
