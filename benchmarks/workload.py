"""Seeded prompts of exact lengths, and shapes of random models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from agentcache.bench.ttft import WORDS
from agentcache.client import Client

# 84 million parameters, 336 MB of float32: decoding is bound by reading weights.
WEIGHTS_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
# As many parameters in fewer layers and heads. After 16K tokens attention is a third of the work, as in 8B models.
# With the shape above it exceeds half, and the smallest chunk takes longer than the stall limit.
LONG_PROMPT_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Little to compute, so that long contexts are affordable.
CONTEXT_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# The cache of an 8B model with few weights: restoring dominates a warm turn.
RESTORE_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


class TokenSource:
    """Random ids of ordinary words: exact lengths, no special tokens."""

    def __init__(self, client: Client, seed: int) -> None:
        self._vocabulary = sorted(set(client.token_ids(WORDS, salt="workload")))
        self._random = random.Random(seed)

    def take(self, count: int) -> list[int]:
        return self._random.choices(self._vocabulary, k=count)


def turn_body(
    agent: str | None, prompt: Sequence[int], max_tokens: int, *, return_token_ids: bool = False
) -> dict[str, Any]:
    """Return the body of a greedy completion of exactly `max_tokens`.

    `return_token_ids` also times tokens without text, but slows long prompts, whose ids return too.
    """
    return {
        "prompt": list(prompt),
        **({} if agent is None else {"agent": agent}),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "agentcache": {"return_token_ids": return_token_ids, "report": True},
    }
