"""Logprobs in OpenAI's shapes."""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any

from agentcache.report import TokenLogprob, readable

# What OpenAI sends for a token that cannot occur, since JSON has no infinity.
IMPOSSIBLE = -9999.0


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """OpenAI's shape for chat."""
    return {"content": [_chat_token(token) for token in logprobs], "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    top = [_chat_logprob(data, logprob) for _, data, logprob in token.top]
    return _chat_logprob(token.data, token.logprob) | {"top_logprobs": top}


def _chat_logprob(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": readable(data), "logprob": _finite(logprob), "bytes": list(data)}


class TextOffsets:
    """Characters of the text in front of each token. A character belongs to the token that completes it.

    Args:
        start: characters in front of the first token.
    """

    def __init__(self, start: int = 0) -> None:
        self._end = start
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Iterable[TokenLogprob]) -> list[int]:
        """Of the next tokens."""
        return [self._add(token) for token in tokens]

    def _add(self, token: TokenLogprob) -> int:
        offset = self._end
        if token.shown:
            self._end += len(self._decoder.decode(token.data))
        return offset

    @classmethod
    def of_prompt(cls, tokens: Sequence[TokenLogprob], end: int) -> list[int]:
        """Of a prompt whose text ends at `end`: what its tokens have more than that (a BOS, a space) is in front."""
        counted = cls()
        offsets = counted.of(tokens)
        return [max(0, offset - counted._end + end) for offset in offsets]


def text_logprobs(tokens: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
    """OpenAI's legacy shape for text completions; one of `offsets` per token."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_text_top(token) for token in tokens],
        "text_offset": list(offsets),
    }


def _text_top(token: TokenLogprob) -> dict[str, float | None] | None:
    """Alternatives by text, the chosen token always among them. Of tokens with equal texts the likeliest stands."""
    if token.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for _, data, logprob in token.top:
        top.setdefault(readable(data), _finite(logprob))
    top.setdefault(token.text, _finite(token.logprob))
    return top


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
