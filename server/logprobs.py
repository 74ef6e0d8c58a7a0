"""Logprobs in OpenAI's shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from agentcache.serving.request import TokenLogprob

# What OpenAI sends for a token that cannot occur, since JSON has no infinity.
IMPOSSIBLE = -9999.0


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """OpenAI's shape for chat."""
    return {"content": [_chat_token(token) for token in logprobs], "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    top = [_chat_logprob(text, logprob) for _, text, logprob in token.top]
    return _chat_logprob(token.text, token.logprob) | {"top_logprobs": top}


def _chat_logprob(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def text_logprobs(logprobs: Sequence[TokenLogprob], *, start: int = 0) -> dict[str, Any]:
    """OpenAI's legacy shape for text completions.

    Args:
        logprobs: one per token.
        start: characters of the text before the first token, for `text_offset`.
    """
    offsets = []
    for token in logprobs:
        offsets.append(start)
        start += len(token.text)
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [_finite(token.logprob) for token in logprobs],
        "top_logprobs": [_text_top(token) for token in logprobs],
        "text_offset": offsets,
    }


def _text_top(token: TokenLogprob) -> dict[str, float | None] | None:
    """Alternatives by text, the chosen token always among them. Of tokens with equal texts the likeliest stands."""
    if token.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for _, text, logprob in token.top:
        top.setdefault(text, _finite(logprob))
    top.setdefault(token.text, _finite(token.logprob))
    return top


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
