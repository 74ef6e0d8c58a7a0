"""Text to tokens and back, in a line."""

from __future__ import annotations

from typing import Any

import tokenizers

from agentcache.text.tokenizer import Tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def specials(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in sorted(tokenizer.control_ids)]


def decoded(tokenizer: Tokenizer, token_ids: list[int], after: int | None = None) -> str:
    detokenizer = tokenizer.detokenizer(after)
    return "".join([*map(detokenizer.add, token_ids), detokenizer.finish()])


def control(tokenizer: Tokenizer) -> int:
    return ids_of(tokenizer, tokenizer.raw_prompt(""))[0] if tokenizer.raw_prompt("") else min(tokenizer.control_ids)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


class StandInWrapper:
    """What Tokenizer needs of mlx-lm's wrapper."""

    has_chat_template = False
    eos_token_ids = frozenset({1})

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend_tokenizer = backend
