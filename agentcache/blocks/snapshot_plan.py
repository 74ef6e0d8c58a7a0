"""Decides where checkpoints of recurrent state are taken, and which stay on disk.

A checkpoint is as large as the KV of thousands of tokens, so they are few: at an interval, where prompts are likely to
branch (as in Marconi, arXiv 2411.19379), and at a turn's end. Prompts are cut at block borders, where recurrent layers
give the same bits as uncut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from agentcache.blocks.keys import BLOCK_SIZE

MOST_SAVED = 3
DEFAULT_INTERVAL = 2048  # also the minimum
_INTERVAL_WITHOUT_ATTENTION = 8192
# Checkpoints on disk may cost twice the KV of the same tokens. A fifth is for system prompts and idle agents.
_COST = 2 / 1.25


def interval_for(state_bytes: int, bytes_per_token: int) -> int:
    """Return a model's checkpoint interval in tokens, whole blocks. `bytes_per_token` is 0 without attention."""
    if not bytes_per_token:
        return _INTERVAL_WITHOUT_ATTENTION
    tokens = math.ceil(state_bytes / (_COST * bytes_per_token))
    return max(DEFAULT_INTERVAL, whole_blocks(tokens + BLOCK_SIZE - 1))


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


@dataclass(frozen=True)
class SnapshotPlan:
    """Where one request takes checkpoints, besides its end.

    Args:
        every: interval in tokens.
        borders: block borders, the adapter's start, and the end of what the next prompt repeats.
        lasting: border where other conversations probably start; 0 for none.
    """

    every: int
    borders: frozenset[int] = frozenset()
    lasting: int = 0

    @classmethod
    def of(
        cls,
        every: int,
        start: int,
        num_tokens: int,
        system_tokens: int,
        known_tokens: int,
        base_tokens: int = 0,
        repeated_tokens: int = 0,
    ) -> SnapshotPlan:
        """Return the plan for a prompt that is computed from `start` on.

        Args:
            known_tokens: tokens with cached KV. Another conversation probably branches there.
            base_tokens: tokens before the adapter's start, which base and other adapters can continue, or 0.
            repeated_tokens: tokens that the next prompt repeats, if it changes the reply; else 0.
        """
        lasting, branch = whole_blocks(system_tokens), whole_blocks(known_tokens)
        # For a repeated prompt, whose last token is always computed.
        last = whole_blocks(max(0, num_tokens - 1))
        # Each cut costs a step, too much in a short turn.
        wanted = {branch} if last <= repeated_tokens < num_tokens else {branch, last}
        borders = {border for border in wanted if border - start >= BLOCK_SIZE}
        return cls(every, frozenset(borders | {lasting, base_tokens, repeated_tokens} - {0}), lasting)

    def next_after(self, num_tokens: int) -> int:
        regular = (num_tokens // self.every + 1) * self.every
        return min([regular, *(border for border in self.borders if border > num_tokens)])

    def wants(self, num_tokens: int) -> bool:
        return num_tokens > 0 and (num_tokens % self.every == 0 or num_tokens in self.borders)


def choose_saved(
    found: Iterable[int],
    saved: Collection[int],
    *,
    lasting: int,
    num_tokens: int,
    every: int,
    returns: Collection[int] = (),
    final: bool = False,
) -> list[int]:
    """Choose at most `MOST_SAVED` of a lineage's checkpoints to keep on disk, by position.

    Args:
        found: in RAM or on disk.
        saved: on disk.
        lasting: position after the system prompt; 0 for none.
        every: tokens that may be recomputed after a crash.
        returns: other positions where the next prompt may leave the lineage: before text that the template does not
            repeat, and before an adapter's text.
        final: whether to avoid any recomputation: the agent is idle, or the server closes.
    """
    found = sorted(found)
    ends = sorted({*returns, num_tokens})
    chosen = set(saved)
    for end in ends:  # one may serve later ends
        newest, last = _last(found, end), _last(chosen, end)
        if newest > last and (final or end - last > every):
            chosen.add(newest)
    # A short system prompt is cheaper to compute than to keep.
    if lasting in found and (lasting in saved or 2 * lasting >= every):
        chosen.add(lasting)
    there = [position for position in found if position in chosen]
    # Most valuable first.
    wanted = [_last(there, num_tokens), lasting, *(_last(there, end) for end in reversed(ends)), *reversed(there)]
    return sorted([position for position in dict.fromkeys(wanted) if position in there][:MOST_SAVED])


def _last(positions: Iterable[int], end: int) -> int:
    return max((position for position in positions if position <= end), default=0)
