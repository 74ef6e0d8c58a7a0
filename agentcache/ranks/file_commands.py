"""Commands and questions about block files.

A command with a `number` is a question; its answer, in bytes, comes with a later message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from agentcache.ranks.words import Numbers, WordReader, WordWriter
from agentcache.store.block_file import BlockHeader

_KEY_BYTES = 20


@dataclass(frozen=True)
class Block:
    """A block's header, and the ticket of its bytes."""

    ticket: int
    header: BlockHeader

    def put(self, words: WordWriter) -> None:
        header = self.header
        words.put(self.ticket, header.position)
        words.put_bytes(header.packed)
        keys = (header.block_key, header.chain, header.parent)
        words.put_bytes(b"".join(map(bytes.fromhex, keys)))
        words.put_texts((header.group, header.producer))

    @classmethod
    def get(cls, words: WordReader) -> Block:
        ticket, position = words.get(), words.get()
        packed, keys = words.get_bytes(), words.get_bytes().hex()
        name, producer = words.get_texts()
        key, chain, parent = (keys[start : start + 2 * _KEY_BYTES] for start in range(0, len(keys), 2 * _KEY_BYTES))
        return cls(ticket, BlockHeader(key, chain, parent, name, position, packed, producer))


@dataclass(frozen=True)
class _OfBlocks:
    number: int
    blocks: Sequence[Block]

    def put(self, words: WordWriter) -> None:
        words.put(self.number, len(self.blocks))
        for block in self.blocks:
            block.put(words)

    @classmethod
    def get(cls, words: WordReader) -> Self:
        number, count = words.get(), words.get()
        return cls(number, [Block.get(words) for _ in range(count)])


@dataclass(frozen=True)
class WriteBlocks(_OfBlocks):
    """Make all blocks durable, or none. Answer: an error text, empty on success."""

    code: ClassVar = 12


@dataclass(frozen=True)
class ReadBlocks(_OfBlocks):
    """Read, verify and keep blocks under their tickets. Answer: one byte per block, 1 if valid."""

    code: ClassVar = 13


@dataclass(frozen=True)
class Require:
    """Ask which of these blocks are not on disk. Answer: their keys."""

    code: ClassVar = 14
    number: int
    keys: Sequence[str]

    def put(self, words: WordWriter) -> None:
        words.put(self.number)
        words.put_bytes(pack_keys(self.keys))

    @classmethod
    def get(cls, words: WordReader) -> Require:
        return cls(words.get(), list(unpack_keys(words.get_bytes())))


@dataclass(frozen=True)
class TakeStock(Numbers):
    """Ask for the keys of all blocks on disk."""

    code: ClassVar = 15
    number: int


@dataclass(frozen=True)
class _OfKeys:
    keys: Sequence[str]

    def put(self, words: WordWriter) -> None:
        words.put_bytes(pack_keys(self.keys))

    @classmethod
    def get(cls, words: WordReader) -> Self:
        return cls(list(unpack_keys(words.get_bytes())))


@dataclass(frozen=True)
class Delete(_OfKeys):
    code: ClassVar = 16


@dataclass(frozen=True)
class KeepOnly(_OfKeys):
    """Remove all other blocks' files."""

    code: ClassVar = 17


Question = WriteBlocks | ReadBlocks | Require | TakeStock


def pack_keys(keys: Sequence[str]) -> bytes:
    """Encode keys as 20 bytes each."""
    return bytes.fromhex("".join(keys))


def unpack_keys(data: bytes) -> Iterator[str]:
    """Inverse of `pack_keys`."""
    return (data[start : start + _KEY_BYTES].hex() for start in range(0, len(data), _KEY_BYTES))
