"""Divides device time between decoding and prefill.

While requests decode, a chunk takes at most `max_stall`, and decoding then gets its share. Short prompts and first
tokens of answers may go early; the decode deficit balances that later.

Without decoding, no current measurement counts: where a prompt is cut decides the last bits of its KV, which must not
depend on load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SMALLEST_CHUNK = 32  # smaller chunks cost nearly as much
_LARGEST_IDLE_CHUNK = 2048
_IDLE_STALLS = 4
PATIENCE = 10  # stalls by which one side may exceed its share
_MOST_PATIENCE = 2.0  # seconds
_DEPTH_UNIT = 256
_WEIGHT = 0.5  # of the newest measurement


@dataclass(frozen=True)
class _Rate:
    seconds: float
    context: int

    def at(self, context: int) -> float:
        """The rate grows at most linearly with depth and never shrinks."""
        return self.seconds * max(1.0, (context + _DEPTH_UNIT) / (self.context + _DEPTH_UNIT))


def idle_chunk(chunk: int, *, max_stall: float, token_seconds: float) -> int:
    """`chunk`, doubled while it takes at most a few stalls."""
    num_tokens = chunk
    while 2 * num_tokens <= min(_LARGEST_IDLE_CHUNK, _IDLE_STALLS * max_stall / token_seconds):
        num_tokens *= 2
    return num_tokens


class TokenBudget:
    """Measured rates and the decode deficit, in seconds.

    `chunk`, `idle_chunk`: largest chunk, in tokens, while requests decode, and otherwise. `token_seconds`: rate before
    a measurement; inf if unknown.
    """

    def __init__(
        self, *, max_stall: float, decode_share: float, chunk: int, idle_chunk: int, token_seconds: float = math.inf
    ) -> None:
        self.max_stall = max_stall
        self._assumed_seconds = token_seconds
        self._ratio = decode_share / (1 - decode_share)
        self._chunk = chunk
        self._idle_chunk = idle_chunk
        self._rates: dict[int, _Rate] = {}  # by depth, a power of two
        self._step_seconds = 0.0
        self._patience = min(PATIENCE * max_stall, _MOST_PATIENCE)
        self._deficit = 0.0  # negative if decoding is ahead

    @property
    def largest_chunk(self) -> int:
        return max(self._chunk, self._idle_chunk)

    @property
    def step_seconds(self) -> float:
        return self._step_seconds

    @property
    def decoding_is_due(self) -> bool:
        """Whether a deficit remains after the step under way."""
        return self._deficit > self._step_seconds

    @property
    def may_defer_decodes(self) -> bool:
        """Whether a decode step may go before a due chunk."""
        return self._deficit - self._step_seconds > -self._patience

    def is_sooner_done(self, num_steps: int, num_tokens: int, context: int) -> bool:
        return num_steps * self._step_seconds < self._estimate(num_tokens, context)

    def may_prefill_more(self, num_tokens: int, context: int) -> bool:
        return self._deficit / self._ratio + self._estimate(num_tokens, context) <= self._patience

    def is_short(self, num_tokens: int) -> bool:
        return self._estimate(num_tokens, num_tokens // 2) <= self._patience

    def _estimate(self, num_tokens: int, context: int) -> float:
        return num_tokens * (self._token_seconds(context) or self._assumed_seconds)

    def chunk_tokens(self, context: int, *, contended: bool) -> int:
        if not contended:
            return self._idle_chunk
        seconds = self._token_seconds(context)
        smallest = min(SMALLEST_CHUNK, self._chunk)
        return smallest if seconds is None else max(smallest, int(min(self.max_stall / seconds, self._chunk)))

    def _token_seconds(self, context: int) -> float | None:
        if not self._rates:
            return None
        depth = _depth(context)
        shallower = [known for known in self._rates if known <= depth]
        return self._rates[max(shallower) if shallower else min(self._rates)].at(context)

    def chunk_took(self, seconds: float, num_tokens: int, context: int, *, contended: bool, whole: bool = True) -> None:
        """Record a chunk: `contended` if it delayed decoding, `whole` if it ran all layers."""
        if whole:
            self._note_rate(seconds, num_tokens, context)
        deficit = self._deficit + seconds * self._ratio
        self._deficit = deficit if contended else min(0.0, deficit)

    def _note_rate(self, seconds: float, num_tokens: int, context: int) -> None:
        middle = context + num_tokens // 2
        depth, measured = _depth(middle), seconds / num_tokens
        known = self._rates.get(depth)
        if known is not None:
            measured = _average(measured, known.at(middle))
        self._rates[depth] = _Rate(measured, middle)

    def step_took(self, seconds: float, *, contended: bool = False) -> None:
        """Record a step, `contended` if it went before a due chunk."""
        least = -self._patience if contended or self._deficit < 0 else 0.0
        self._deficit = max(least, self._deficit - seconds)
        self._step_seconds = _average(seconds, self._step_seconds or seconds)

    def reset(self) -> None:
        """Clear decoding's lead, as no prompt waits."""
        self._deficit = max(0.0, self._deficit)


def _average(measured: float, known: float) -> float:
    return _WEIGHT * measured + (1 - _WEIGHT) * known


def _depth(context: int) -> int:
    return (context // _DEPTH_UNIT).bit_length()
