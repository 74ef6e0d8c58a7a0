"""Runs a loaded model the way the engine does: one pool a group, block tables reserved before each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from agentcache.blocks.hidden_states import HiddenStatePlan
from agentcache.blocks.pool import BlockPool, BlockTable, Holds
from agentcache.models.adapters import RowAdapter
from agentcache.models.loader import LoadedModel
from agentcache.models.runner import ModelRunner
from agentcache.models.step import RowState, StepInputs


@dataclass
class Row:
    """One sequence: a block table per group, and what recurrent layers keep."""

    tables: list[BlockTable]
    length: int = 0
    state: RowState | None = None


class Driver:
    """A runner with its pools."""

    def __init__(self, loaded: LoadedModel, *, measures: bool = False) -> None:
        self.loaded = loaded
        self.pools = [BlockPool() for _ in loaded.spec.groups]
        self.runner = ModelRunner(loaded, self.pools, measures=measures)

    def row(self) -> Row:
        return Row([BlockTable() for _ in self.pools])

    def step(
        self,
        rows: Sequence[Row],
        token_ids: np.ndarray,
        *,
        all_logits: bool = True,
        adapters: Sequence[RowAdapter | None] = (),
        hidden_states: HiddenStatePlan = HiddenStatePlan(),  # noqa: B008
    ) -> mx.array:
        """Logits [B, n or 1, vocabulary] of the next tokens [B, n]."""
        for row in rows:
            self._reserve(row, token_ids.shape[1])
        step = StepInputs(
            mx.array(token_ids.astype(np.int32)),
            lengths := [row.length for row in rows],
            reads=self.runner.reads(
                tables := [row.tables for row in rows], lengths, token_ids.shape[1], hidden_states.cut
            ),
            writes=self.runner.writes(tables, lengths, token_ids.shape[1], hidden_states.cut),
            adapters=adapters,
            hidden_states=hidden_states,
            all_logits=all_logits,
            states=[row.state for row in rows],
        )
        outputs = self.runner.forward(step)
        logits = outputs.logits
        mx.eval(logits)
        self.runner.evaluate()
        for row in rows:
            row.length += token_ids.shape[1]
        for row, state in zip(rows, outputs.states, strict=True):
            row.state = state
        return logits

    def logits(
        self, token_ids: np.ndarray, chunks: Sequence[int], row: Row | None = None, adapter: RowAdapter | None = None
    ) -> mx.array:
        """Logits [n, vocabulary] of one row's tokens [n], computed chunk by chunk."""
        row = row or self.row()
        ends = np.cumsum(chunks)
        assert ends[-1] == len(token_ids)
        pieces = [token_ids[end - size : end] for end, size in zip(ends, chunks, strict=True)]
        return mx.concatenate([self.step([row], piece[None], adapters=[adapter])[0] for piece in pieces])

    def _reserve(self, row: Row, num_tokens: int) -> None:
        for group, table, pool in zip(self.loaded.spec.groups, row.tables, self.pools, strict=True):
            if group.holds is Holds.OPEN:  # all of block 0, and the open one
                for block_id in table.clear(1, row.length // 256):
                    if block_id >= 0:
                        pool.release(block_id)
            if group.holds is Holds.FULL:
                table.first_block = 1
            while table.end_block * 256 < row.length + num_tokens:
                if not pool.num_free:
                    pool.grow(pool.capacity + 2)
                table.block_ids.append(pool.allocate())


def random_ids(loaded: LoadedModel, shape: int | tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, loaded.tokenizer.vocab_size, shape)


def chunks_of(size: int, total: int) -> list[int]:
    """`total` cut into chunks of `size`, the last one shorter."""
    return [min(size, total - start) for start in range(0, total, size)]
