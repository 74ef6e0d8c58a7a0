"""Logprobs in OpenAI's shapes."""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any

from agentcache.api.report import TokenLogprob, readable

# OpenAI's value for impossible tokens: JSON has no infinity.
IMPOSSIBLE = -9999.0


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_chat_token(token) for token in logprobs], "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    top = [_chat_logprob(data, logprob) for _, data, logprob in token.top]
    return _chat_logprob(token.data, token.logprob) | {"top_logprobs": top}


def _chat_logprob(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": readable(data), "logprob": _finite(logprob), "bytes": list(data)}


class TextOffsets:
    """Tokens' offsets in the text. A character belongs to the token that completes it."""

    def __init__(self, start: int = 0) -> None:
        self._end = start
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Iterable[TokenLogprob]) -> list[int]:
        return [self._add(token) for token in tokens]

    def _add(self, token: TokenLogprob) -> int:
        offset = self._end
        if token.shown:
            self._end += len(self._decoder.decode(token.data))
        return offset

    @classmethod
    def of_prompt(cls, tokens: Sequence[TokenLogprob], end: int) -> list[int]:
        """Return offsets in a prompt of `end` characters. Extra leading text (a BOS, a space) gets 0."""
        counted = cls()
        offsets = counted.of(tokens)
        return [max(0, offset - counted._end + end) for offset in offsets]


def text_logprobs(tokens: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
    """Write OpenAI's legacy shape for text completions."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_text_top(token) for token in tokens],
        "text_offset": list(offsets),
    }


def _text_top(token: TokenLogprob) -> dict[str, float | None] | None:
    """Return alternatives by text, the likeliest for equal texts."""
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
