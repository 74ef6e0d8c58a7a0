"""Seeded prompts of exact lengths, and shapes of the random models that benchmarks run on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from agentcache.bench.ttft import WORDS
from agentcache.client import Client

# 84 million parameters, 336 MB of float32: far more than a CPU's caches, so decoding is bound by reading weights.
WEIGHTS_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
# As many parameters in fewer layers and heads: behind 16K tokens attention is a third of the work, as in models of
# 8 billion parameters; above it would be more than half, and the smallest chunk would take longer than a stall.
LONG_PROMPT_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Little to compute and much to remember: 16K tokens take 19 s to prefill on two CPU cores, and hold 9 MB of Q4 cache.
CONTEXT_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# A cache of an 8B model's shape, 41 KB a token in 4 bits, over few weights: restoring is most of a warm turn.
RESTORE_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


class TokenSource:
    """Random ids of the model's own tokens for ordinary words: exact lengths, no special tokens."""

    def __init__(self, client: Client, seed: int) -> None:
        self._vocabulary = sorted(set(client.token_ids(WORDS, salt="workload")))
        self._random = random.Random(seed)

    def take(self, count: int) -> list[int]:
        return self._random.choices(self._vocabulary, k=count)


def turn_body(
    agent: str | None, prompt: Sequence[int], max_tokens: int, *, return_token_ids: bool = False
) -> dict[str, Any]:
    """A greedy completion of token ids that runs to `max_tokens`.

    With the token ids in the answer tokens without text are timed too; the prompt's ids come back then as well, which
    takes its time for long prompts.
    """
    return {
        "prompt": list(prompt),
        **({} if agent is None else {"agent": agent}),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "agentcache": {"return_token_ids": return_token_ids, "report": True},
    }
