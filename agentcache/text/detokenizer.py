"""Converts token ids to text, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum, auto
from functools import cache
from typing import Any

from agentcache.errors import UnsupportedModel

_SPACE = "▁"


class DummySpace(Enum):
    """First space that the tokenizer has added: none, any, or one that is single."""

    NONE = auto()
    ANY = auto()
    LONE = auto()


class Detokenizer:
    """Converts one reply's tokens to text.

    `ends[i]`: the text's length after token i, not final while a character is incomplete.
    """

    def __init__(
        self, bytes_of: Callable[[int], bytes], control_ids: Set[int], dummy_space: DummySpace = DummySpace.NONE
    ) -> None:
        self.ends: list[int] = []
        self._parts: list[str] = []  # a string would be copied
        self._length = 0
        self._bytes_of = bytes_of
        self._control_ids = control_ids
        self._dummy_space = dummy_space
        self._held_space = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_open = 0

    @property
    def text(self) -> str:
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def add(self, token_id: int) -> str:
        if token_id in self._control_ids:
            new_text = self.finish()
            self.ends.append(self._length)
            return new_text
        piece = self._without_dummy_space(self._bytes_of(token_id))
        if piece and not self._num_open and piece.isascii():
            new_text = piece.decode("ascii")
            self._append(new_text)
            self.ends.append(self._length)
            return new_text
        new_text = self._decoder.decode(piece)
        self.ends.append(self._length + len(new_text))
        self._num_open += 1
        if piece:
            self._resolve(new_text)
        return new_text

    def finish(self) -> str:
        new_text = self._decoder.decode(self._held_space, final=True)
        self._held_space = b""
        self._resolve(new_text)
        return new_text

    def _without_dummy_space(self, piece: bytes) -> bytes:
        if self._dummy_space is DummySpace.NONE or not piece:
            return piece
        piece, self._held_space = self._held_space + piece, b""
        if self._dummy_space is DummySpace.LONE and piece == b" ":
            self._held_space = piece
            return b""
        is_text = self._dummy_space is DummySpace.LONE and piece.startswith(b"  ")
        self._dummy_space = DummySpace.NONE
        return piece if is_text else piece.removeprefix(b" ")

    def _resolve(self, new_text: str) -> None:
        self._append(new_text)
        if not self._decoder.getstate()[0]:
            for index in range(len(self.ends) - self._num_open, len(self.ends)):
                self.ends[index] = self._length
            self._num_open = 0

    def _append(self, new_text: str) -> None:
        if new_text:
            self._parts.append(new_text)
            self._length += len(new_text)


class TokenBytes:
    """Decodes single tokens to bytes. Raises UnsupportedModel if `decoder` cannot."""

    def __init__(
        self,
        decoder: Mapping[str, Any] | None,
        piece_of: Callable[[int], str | None],
        added: Mapping[int, str],
        control_ids: Set[int],
    ) -> None:
        parts = list(_decoder_parts(decoder))
        kinds = {part["type"] for part in parts}
        if not kinds or not kinds <= _KNOWN_DECODERS:
            raise UnsupportedModel(f"The tokenizer's decoder {sorted(kinds)} does not give text token by token.")
        self.strips_space = any(_strips_space(part) for part in parts)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._replacements = [_replacement(part) for part in parts if part["type"] in ("Replace", "Metaspace")]
        self._piece_of = piece_of
        self._added = added
        self._control_ids = control_ids
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> bytes:
        if token_id in self._control_ids:
            return self._added[token_id].encode()
        piece = self._piece_of(token_id) or ""
        if self._byte_level:
            return piece.encode() if token_id in self._added else _byte_level_bytes(piece)
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


_KNOWN_DECODERS = {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


def _decoder_parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoder_parts(part)
    else:
        yield decoder


def _strips_space(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return bool(part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True))
    return bool(part["type"] == "Strip" and part["content"] == " " and part["start"] > 0)


def _replacement(part: Mapping[str, Any]) -> tuple[str, str]:
    if part["type"] == "Metaspace":
        return part.get("replacement", _SPACE), " "
    pattern = part["pattern"].get("String")
    if pattern is None:
        raise UnsupportedModel(
            "The tokenizer's decoder replaces by a regular expression, which has no text token by token."
        )
    return pattern, part["content"]


def _byte_level_bytes(piece: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in piece)
    except KeyError:
        return piece.encode()


@cache
def _byte_of_character() -> dict[str, int]:
    # GPT-2's alphabet of bytes.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
