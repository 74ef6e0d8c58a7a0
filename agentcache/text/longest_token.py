"""Bounds the text per token: a text's length then gives its minimum number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_COMPOSED = 4  # maximum that a Unicode normal form merges
_COMPOSING = {"NFC", "NFD", "NFKC", "NFKD"}
_SPLITTING = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}


def longest_token(saved: Mapping[str, Any]) -> int | None:
    """Return the maximum characters per token; None if the tokenizer may drop characters.

    White space that an added token absorbs does not count. `saved` is the content of tokenizer.json.
    """
    model = saved["model"]
    vocabulary = model.get("vocab")
    pieces = list(vocabulary) if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary or ()]
    splits = list(_steps(saved.get("pre_tokenizer"), "pretokenizers"))
    changes = list(_steps(saved.get("normalizer"), "normalizers"))
    if not _knows_every_byte(model, pieces, splits) or not all(map(_keeps_text, splits)):
        return None
    if not all(step["type"] in _COMPOSING or _lengthens(step) for step in changes):
        return None
    added = [token["content"] for token in saved.get("added_tokens") or ()]
    factor = _COMPOSED if any(step["type"] in _COMPOSING for step in changes) else 1
    return factor * max(map(len, [*pieces, *added]), default=1)


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[name]:
            yield from _steps(step, name)
    else:
        yield part


def _knows_every_byte(model: Mapping[str, Any], pieces: list[str], splits: list[Mapping[str, Any]]) -> bool:
    known = set(pieces)
    if model.get("byte_fallback"):
        return all(f"<0x{value:02X}>" in known for value in range(256))
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    return is_byte_level and sum(len(piece) == 1 for piece in known) >= 256


def _keeps_text(step: Mapping[str, Any]) -> bool:
    return step["type"] in _SPLITTING and step.get("behavior") != "Removed"


def _lengthens(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer never shortens a text."""
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        return old is not None and len(step["content"]) >= len(old)
    return bool(step["type"] == "Prepend")
