from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from agentcache.blocks.keys import BLOCK_SIZE
from agentcache.blocks.pool import BlockTable
from agentcache.errors import BrokenInvariant
from agentcache.kv.step_plan import Reads, Writes
from agentcache.models.step import StepInputs
from agentcache.ranks.words import Numbers, WordReader, WordWriter


@dataclass(frozen=True)
class Rows:
    """Slots of one group that each row reads or writes, and the first slot's block index."""

    slots: Sequence[Sequence[int]]
    firsts: Sequence[int]

    @property
    def tables(self) -> list[BlockTable]:
        return [BlockTable(list(slots), first) for slots, first in zip(self.slots, self.firsts, strict=True)]

    def put(self, words: WordWriter) -> None:
        for slots, first in zip(self.slots, self.firsts, strict=True):
            words.put(first)
            words.put_list(slots)

    @classmethod
    def get(cls, words: WordReader, count: int) -> Rows:
        firsts, slots = list[int](), list[list[int]]()
        for _ in range(count):
            firsts.append(words.get())
            slots.append(words.get_list())
        return cls(slots, firsts)


@dataclass(frozen=True)
class RowUse:
    """A row's adapter, by number, and the token from which it applies."""

    adapter: int
    start: int


@dataclass(frozen=True)
class Forward:
    """Compute a step. Encoding reads the token ids, which are known by then.

    Args:
        token_ids: int32 [B, n].
        uses: per row its adapter or None; empty without adapters.
    """

    code: ClassVar = 1
    token_ids: mx.array
    lengths: Sequence[int]
    reads: Sequence[Rows]
    writes: Sequence[Rows]
    uses: Sequence[RowUse | None] = ()
    all_logits: bool = False

    @classmethod
    def of(cls, step: StepInputs, uses: Sequence[RowUse | None]) -> Forward:
        """The command for a step without a decoder, hidden states, recurrent states and residuals."""
        if (
            step.model is not None
            or step.hidden_states.cut
            or step.hidden_states.writes
            or step.states
            or step.residual is not None
        ):
            raise BrokenInvariant("a step with what only one process has")
        return cls(
            step.token_ids,
            step.lengths,
            [_read_rows(reads) for reads in step.reads],
            [_written_rows(writes, step.lengths) for writes in step.writes],
            uses if any(uses) else (),
            step.all_logits,
        )

    def put(self, words: WordWriter) -> None:
        token_ids = np.array(self.token_ids, np.int32)
        words.put(*token_ids.shape, len(self.reads), self.all_logits, len(self.uses))
        words.put_list(token_ids.reshape(-1).tolist())
        words.put_list(self.lengths)
        for rows in (*self.reads, *self.writes):
            rows.put(words)
        for use in self.uses:
            words.put(*(-1, 0) if use is None else (use.adapter, use.start))

    @classmethod
    def get(cls, words: WordReader) -> Forward:
        batch, num_tokens, groups, all_logits, num_uses = (words.get() for _ in range(5))
        token_ids = mx.array(words.get_list(), mx.int32).reshape(batch, num_tokens)
        lengths = words.get_list()
        reads = [Rows.get(words, batch) for _ in range(groups)]
        writes = [Rows.get(words, batch) for _ in range(groups)]
        numbers = [(words.get(), words.get()) for _ in range(num_uses)]
        uses = [None if adapter < 0 else RowUse(adapter, start) for adapter, start in numbers]
        return cls(token_ids, lengths, reads, writes, uses, bool(all_logits))


def _read_rows(reads: Reads | None) -> Rows:
    if reads is None:
        raise BrokenInvariant("a step that passes layers by")
    return Rows([row.block_ids for row in reads.rows], [row.base // BLOCK_SIZE for row in reads.rows])


def _written_rows(writes: Writes | None, lengths: Sequence[int]) -> Rows:
    if writes is None:
        raise BrokenInvariant("a step that passes layers by")
    return Rows(writes.rows, [length // BLOCK_SIZE for length in lengths])


@dataclass(frozen=True)
class Start(Numbers):
    """Start the device on the preceding commands.

    `whole`: whether logits are needed. If not, no rank computes what KV does not need: it contains reductions.
    """

    code: ClassVar = 2
    whole: bool
