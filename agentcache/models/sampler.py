"""Choosing a token from logits, and log probabilities. One row at a time; the parameters differ per row."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

_REPETITION_CONTEXT = 64  # tokens a repetition penalty looks back
_SMALLEST_TEMPERATURE = 1e-5  # below it, scaled log probabilities leave float32
_SMALLEST_TOP_P = 1e-6  # keeps the best token


class Sampler:
    """A request's way of choosing tokens.

    Args:
        temperature: 0 means greedy.
        top_p, top_k, min_p: 1.0, 0 and 0.0 switch the truncations off.
        repetition_penalty: divides positive and multiplies negative logits of the last 64 tokens; 1.0 is off.
        logit_bias: added to the logits, by token id; ids that the model has no logit for are passed over.
        seed: a sampler with the same seed and the same logits draws the same tokens. Any integer.
    """

    def __init__(
        self,
        *,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: dict[int, float] | None = None,
        seed: int | None = None,
    ) -> None:
        self._temperature = temperature
        self._top_p, self._top_k, self._min_p = top_p, top_k, min_p
        self._penalty = repetition_penalty
        self._bias = logit_bias or {}
        self._key = mx.random.key(mx.random.randint(0, 2**31 - 1).item() if seed is None else seed % 2**64)

    def choose(self, logits: mx.array, recent: Sequence[int]) -> mx.array:
        """A token id, int32 [], from logits [vocabulary] after `recent` tokens. Lazy."""
        logits = self._adjusted(logits.astype(mx.float32), recent[-_REPETITION_CONTEXT:])
        if self._temperature < _SMALLEST_TEMPERATURE:
            return mx.argmax(logits, axis=-1)
        logprobs = log_softmax(logits)[None]
        if self._top_p < 1:
            logprobs = apply_top_p(logprobs, max(self._top_p, _SMALLEST_TOP_P))
        if self._min_p > 0:
            logprobs = apply_min_p(logprobs, self._min_p)
        if 0 < self._top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, self._top_k)
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(logprobs / self._temperature, key=key)[0]

    def _adjusted(self, logits: mx.array, recent: Sequence[int]) -> mx.array:
        if self._penalty != 1.0 and recent:
            ids = mx.array(list(recent))
            seen = logits[ids]
            logits[ids] = mx.where(seen > 0, seen / self._penalty, seen * self._penalty)
        biases = {token_id: bias for token_id, bias in self._bias.items() if 0 <= token_id < logits.shape[-1]}
        if biases:
            ids = mx.array(list(biases))
            logits[ids] = logits[ids] + mx.array(list(biases.values()))
        return logits


def log_softmax(logits: mx.array) -> mx.array:
    """Log probabilities in float32, over the last axis."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def top_logprobs(logprobs: mx.array, count: int) -> tuple[list[int], list[float]]:
    """The `count` most likely token ids of log probabilities [vocabulary], best first, and their values."""
    if count == 0:
        return [], []
    order = mx.argsort(-logprobs)[:count]
    return order.tolist(), logprobs[order].tolist()
