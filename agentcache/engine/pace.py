"""How decoding and prefilling share the device's time. Plain arithmetic on measured durations; knows no clock.

A prefill chunk can cost as much as a hundred decode steps, so what is shared is time, not tokens: while anyone decodes,
a chunk is as large as fits into `max_stall`, and after it decoding gets its share before the next one. A short prompt
may go before its turn, and so may the first tokens of an answer; both are on account, and what one side is ahead of its
share the other gets later.

While nobody decodes, nothing measured counts: where a prompt is cut decides the last digits of its keys and values, and
those should be the same in every process, however busy its machine is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SMALLEST_CHUNK = 32  # below this a chunk costs nearly as much as it does with 32 tokens
_LARGEST_IDLE_CHUNK = 2048
_IDLE_STALLS = 4  # stalls that a chunk may take while nobody decodes: whoever arrives meanwhile waits that long
PATIENCE = 10  # stalls by which one side may be ahead of its share, for the sake of what is soon done
_MOST_PATIENCE = 2.0  # seconds
_DEPTH_UNIT = 256
_WEIGHT = 0.5  # of the newest measurement


@dataclass(frozen=True)
class _Rate:
    """Seconds a token takes in a chunk whose middle is `context` tokens deep."""

    seconds: float
    context: int

    def at(self, context: int) -> float:
        """The same further in: at worst a token's cost grows with its context. Never less than here."""
        return self.seconds * max(1.0, (context + _DEPTH_UNIT) / (self.context + _DEPTH_UNIT))


def idle_chunk(chunk: int, *, max_stall: float, token_seconds: float) -> int:
    """Tokens for a chunk while nobody decodes: `chunk`, doubled as long as it lasts a few stalls at most.

    Args:
        chunk: tokens of the largest chunk while somebody does.
        max_stall: seconds.
        token_seconds: what a token costs.
    """
    num_tokens = chunk
    while 2 * num_tokens <= min(_LARGEST_IDLE_CHUNK, _IDLE_STALLS * max_stall / token_seconds):
        num_tokens *= 2
    return num_tokens


class Pace:
    """Measured rates, and what decoding is owed.

    Args:
        max_stall: seconds that a prefill chunk may take while anyone decodes.
        decode_share: share of the time that decoding gets, counted from chunk to chunk.
        chunk: prompt tokens computed at once while anyone decodes, at most; above 0.
        idle_chunk: the same while nobody does (`idle_chunk`).
        token_seconds: what a token of a chunk is taken to cost before any has been measured; inf where nobody knows.
    """

    def __init__(
        self, *, max_stall: float, decode_share: float, chunk: int, idle_chunk: int, token_seconds: float = math.inf
    ) -> None:
        self.max_stall = max_stall
        self._assumed_seconds = token_seconds
        self._ratio = decode_share / (1 - decode_share)
        self._chunk = chunk
        self._idle_chunk = idle_chunk
        self._rates: dict[int, _Rate] = {}  # by depth: the context's length as a power of two
        self._step_seconds = 0.0
        self._patience = min(PATIENCE * max_stall, _MOST_PATIENCE)
        self._owed = 0.0  # seconds of decoding; below zero it has had more than its share

    @property
    def largest_chunk(self) -> int:
        """Tokens of a prompt that are computed at once, at most, whoever else is there."""
        return max(self._chunk, self._idle_chunk)

    @property
    def step_seconds(self) -> float:
        """What a decode step takes, of late; 0.0 before any has been measured."""
        return self._step_seconds

    @property
    def decoding_is_due(self) -> bool:
        """Whether decoding will not have had its share when the step under way is done."""
        return self._owed > self._step_seconds

    @property
    def may_lend(self) -> bool:
        """Whether, after the step under way, another may go before a chunk whose turn it is."""
        return self._owed - self._step_seconds > -self._patience

    def is_sooner_done(self, num_steps: int, num_tokens: int, context: int) -> bool:
        """Whether so many decode steps take less time than so many tokens of a prompt."""
        return num_steps * self._step_seconds < self._estimate(num_tokens, context)

    def may_borrow(self, num_tokens: int, context: int) -> bool:
        """Whether so many tokens of a prompt, of which `context` are computed, may go before their turn."""
        return self._owed / self._ratio + self._estimate(num_tokens, context) <= self._patience

    def is_short(self, num_tokens: int) -> bool:
        """Whether a prompt of which so many tokens are to be computed is soon done."""
        return self._estimate(num_tokens, num_tokens // 2) <= self._patience

    def _estimate(self, num_tokens: int, context: int) -> float:
        """Seconds that the tokens take behind `context` others."""
        return num_tokens * (self._token_seconds(context) or self._assumed_seconds)

    def chunk_tokens(self, context: int, *, contended: bool) -> int:
        """Tokens for the next chunk of a prompt of which `context` tokens are computed.

        Args:
            contended: someone decodes.
        """
        if not contended:
            return self._idle_chunk
        seconds = self._token_seconds(context)
        smallest = min(SMALLEST_CHUNK, self._chunk)
        return smallest if seconds is None else max(smallest, int(min(self.max_stall / seconds, self._chunk)))

    def _token_seconds(self, context: int) -> float | None:
        """Seconds per token, from the nearest depth measured at or above `context`; None before any measurement."""
        if not self._rates:
            return None
        depth = _depth(context)
        shallower = [known for known in self._rates if known <= depth]
        return self._rates[max(shallower) if shallower else min(self._rates)].at(context)

    def chunk_took(self, seconds: float, num_tokens: int, context: int, *, contended: bool, whole: bool = True) -> None:
        """A chunk of `num_tokens` behind `context` tokens is done.

        Args:
            contended: it kept someone from decoding; else it is not owed for, but it is something given back.
            whole: it went through all layers; else it tells no rate.
        """
        if whole:
            self._note_rate(seconds, num_tokens, context)
        owed = self._owed + seconds * self._ratio
        self._owed = owed if contended else min(0.0, owed)

    def _note_rate(self, seconds: float, num_tokens: int, context: int) -> None:
        middle = context + num_tokens // 2
        depth, measured = _depth(middle), seconds / num_tokens
        known = self._rates.get(depth)
        if known is not None:
            measured = _average(measured, known.at(middle))
        self._rates[depth] = _Rate(measured, middle)

    def step_took(self, seconds: float, *, contended: bool = False) -> None:
        """A decode step is done.

        Args:
            contended: it went before a chunk whose turn it was.
        """
        least = -self._patience if contended or self._owed < 0 else 0.0
        self._owed = max(least, self._owed - seconds)
        self._step_seconds = _average(seconds, self._step_seconds or seconds)

    def settle(self) -> None:
        """No prompt waits any more, so none is owed anything."""
        self._owed = max(0.0, self._owed)


def _average(measured: float, known: float) -> float:
    return _WEIGHT * measured + (1 - _WEIGHT) * known


def _depth(context: int) -> int:
    return (context // _DEPTH_UNIT).bit_length()
