"""Published BPE tokenizers with their first merges only; added tokens, normalisers and the like are as published."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

NUM_MERGES = 6000
_LAST_LETTER = 0x250  # of the alphabet; bytes are spelled with letters below it
_SPACE = "\u2581"  # as SentencePiece spells it
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Placeholders; Gemma 3 has six thousand.
_UNUSED = re.compile(r"<unused\d+>|<｜place▁holder▁no▁\d+｜>|<\|reserved_special_token_\d+\|>")


def with_first_merges(published: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, int]]:
    """The content of a smaller tokenizer.json, and its token ids by published ones."""
    model, added = published["model"], [t for t in published["added_tokens"] if not _UNUSED.fullmatch(t["content"])]
    names = {token["content"] for token in added}
    kept = names | {token for token in model["vocab"] if _is_letter(token)}
    merges = []
    for pair in model["merges"]:
        one, other = pair.split(" ") if isinstance(pair, str) else pair
        if one in kept and other in kept and len(merges) < NUM_MERGES:
            merges.append(pair)
            kept.add(one + other)
    old_ids = {token: number for token, number in model["vocab"].items() if token in kept}
    old_ids |= {token["content"]: token["id"] for token in added}
    new_ids = {old: new for new, old in enumerate(sorted(old_ids.values()))}
    vocab = {token: new_ids[old_ids[token]] for token in model["vocab"] if token in kept}
    smaller = dict(published) | {
        "model": model | {"vocab": vocab, "merges": merges},
        "added_tokens": [token | {"id": new_ids[token["id"]]} for token in added],
    }
    for template in _special_tokens(published["post_processor"]):
        for token in template.values():
            token["ids"] = [new_ids[old] for old in token["ids"]]
    return smaller, new_ids


def renumbered(config: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Entries of a config.json with the smaller tokenizer's token ids."""

    def renumber(value: Any) -> Any:
        return [new_ids[each] for each in value if each in new_ids] if isinstance(value, list) else new_ids[value]

    return {name: renumber(value) if name.endswith("_token_id") else value for name, value in config.items()}


def _is_letter(token: str) -> bool:
    return token == _SPACE or bool(_BYTE.fullmatch(token)) or (len(token) == 1 and ord(token) < _LAST_LETTER)


def _special_tokens(processor: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    if processor is None:
        return
    if "special_tokens" in processor:
        yield processor["special_tokens"]
    for each in processor.get("processors", ()):
        yield from _special_tokens(each)
