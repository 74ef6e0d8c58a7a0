"""Where a request's snapshots are taken, and which of a lineage's are kept on disk. Plain arithmetic.

A snapshot costs tens of megabytes, as much as the keys and values of thousands of tokens, and what lies behind the last
one can be computed again from the transcript. So there are few: every so many tokens; where other prompts are likely to
branch off (as Marconi does, arXiv 2411.19379); and at the end of a turn. Prompts are cut at block borders, where
recurrent layers give the same bits as in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from agentcache.blocks.keys import BLOCK_SIZE

MOST_SAVED = 3
DEFAULT_INTERVAL = 2048  # and the least that is chosen for a model
_INTERVAL_WITHOUT_ATTENTION = 8192
# Snapshots on disk are to cost at most twice the keys and values of the same tokens; a fifth of that is for the one
# behind the system prompt and for those of idle agents.
_COST = 2 / 1.25


def interval_for(state_bytes: int, bytes_per_token: int) -> int:
    """Tokens from one snapshot to the next, whole blocks, for a model whose state takes so many bytes.

    Args:
        bytes_per_token: of its keys and values; 0 where it has none.
    """
    if not bytes_per_token:
        return _INTERVAL_WITHOUT_ATTENTION
    tokens = math.ceil(state_bytes / (_COST * bytes_per_token))
    return max(DEFAULT_INTERVAL, whole_blocks(tokens + BLOCK_SIZE - 1))


def whole_blocks(num_tokens: int) -> int:
    """The last block border in front of or behind token `num_tokens - 1`."""
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


@dataclass(frozen=True)
class SnapshotPlan:
    """Where snapshots of one request are taken, beside its end.

    Args:
        every: so many tokens, whole blocks.
        borders: and there: at block borders, where an adapter begins, and where the next prompt leaves this one.
        lasting: the one of them where other conversations are likely to begin; 0 for none.
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
        """For a prompt of `num_tokens` that goes on from `start`.

        Args:
            system_tokens: its system prompt and tools.
            known_tokens: as many as the cache has the keys and values of: there it leaves what somebody has said.
            base_tokens: those in front of the first that an adapter acts on, from which base and other adapters go on;
                0 where none acts, or acts on all.
            repeated_tokens: those that the conversation's next prompt repeats, where it does not repeat the reply as it
                is; else 0.
        """
        lasting, branch = whole_blocks(system_tokens), whole_blocks(known_tokens)
        # For an answer to be given anew, or a prompt that another answer leaves: its last token is computed each time.
        last = whole_blocks(max(0, num_tokens - 1))
        # Each cut is one more step, which a short turn would feel, and gain nothing by.
        wanted = {branch} if last <= repeated_tokens < num_tokens else {branch, last}
        borders = {border for border in wanted if border - start >= BLOCK_SIZE}
        return cls(every, frozenset(borders | {lasting, base_tokens, repeated_tokens} - {0}), lasting)

    def next_after(self, num_tokens: int) -> int:
        """The first position behind this one where one is to be taken."""
        regular = (num_tokens // self.every + 1) * self.every
        return min([regular, *(border for border in self.borders if border > num_tokens)])

    def wants(self, num_tokens: int) -> bool:
        """Whether one is to be taken behind so many tokens."""
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
    """Which of a lineage's snapshots are to be on disk, by position: at most `MOST_SAVED`.

    Args:
        found: all that there are, in RAM or on disk.
        saved: those of them that are on disk.
        lasting: the one behind its system prompt; 0 for none.
        num_tokens: the lineage's.
        every: tokens that may be computed again after a crash.
        returns: where a prompt that goes on may leave what the lineage says, beside its end: in front of what a chat
            template does not show again, and of what an adapter has said.
        final: nothing is to be computed again: the agent is idle, or the server closes.
    """
    found = sorted(found)
    ends = sorted({*returns, num_tokens})
    chosen = set(saved)
    for end in ends:  # the first ones first: what is saved for them may do for the others
        newest, last = _last(found, end), _last(chosen, end)
        if newest > last and (final or end - last > every):
            chosen.add(newest)
    # A short system prompt is sooner computed than its snapshot is worth.
    if lasting in found and (lasting in saved or 2 * lasting >= every):
        chosen.add(lasting)
    there = [position for position in found if position in chosen]
    # In the order in which they are worth keeping.
    wanted = [_last(there, num_tokens), lasting, *(_last(there, end) for end in reversed(ends)), *reversed(there)]
    return sorted([position for position in dict.fromkeys(wanted) if position in there][:MOST_SAVED])


def _last(positions: Iterable[int], end: int) -> int:
    """The last one that is not behind `end`; 0 without one."""
    return max((position for position in positions if position <= end), default=0)
