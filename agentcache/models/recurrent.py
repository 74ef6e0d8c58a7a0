"""Recurrent state of a step's rows: joined before the step, split after it.

Recurrent layers are mlx-lm's own; each step gets new `ArraysCache`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from agentcache.compat import ArraysCache
from agentcache.errors import BrokenInvariant
from agentcache.kv.spec import RecurrentSpec, StateTensor

# Per recurrent cache; None for an unfilled entry.
Arrays = Sequence[Sequence[mx.array | None]]


@dataclass(frozen=True, eq=False)
class BatchState:
    """Recurrent state of all rows after a step: arrays [B, ...]."""

    arrays: Arrays
    num_rows: int

    def rows(self) -> list[RowState]:
        """One state per row, without copies."""
        return [RowState(self, index) for index in range(self.num_rows)]


@dataclass(frozen=True, eq=False)
class RowState:
    """One row's recurrent state: a row of a batch, whose arrays it keeps alive. Lazy, see `ModelRunner.forward`."""

    batch: BatchState
    index: int = 0

    @classmethod
    def of(cls, arrays: Arrays) -> RowState:
        """From arrays [1, ...], such as a checkpoint's."""
        return cls(BatchState(arrays, 1))

    def arrays(self) -> list[list[mx.array | None]]:
        span = slice(self.index, self.index + 1)
        return [[None if array is None else array[span] for array in cache] for cache in self.batch.arrays]


def join(rows: Sequence[RowState | None], specs: Sequence[RecurrentSpec]) -> BatchState | None:
    """Join the rows' states (None: a row without tokens); free if they are one whole batch in its order.

    Returns None if no row has tokens: the model then starts by itself.
    """
    present = [row for row in rows if row is not None]
    if not present:
        return None
    batch = present[0].batch
    if [(row.batch, row.index) for row in present] == [(batch, index) for index in range(batch.num_rows)] and len(
        present
    ) == len(rows):
        return batch
    apart = [None if row is None else row.arrays() for row in rows]
    arrays = [
        [
            None if tensor is None else _concatenate([row and row[cache][number] for row in apart], tensor)
            for number, tensor in enumerate(spec.tensors)
        ]
        for cache, spec in enumerate(specs)
    ]
    return BatchState(arrays, len(rows))


def _concatenate(rows: Sequence[mx.array | None], tensor: StateTensor) -> mx.array:
    """[B, ...] from rows [1, ...]; zeros for a row without state, as in `ArraysCache.merge`."""
    empty = mx.zeros((1, *tensor.shape), getattr(mx, tensor.dtype))
    return mx.concatenate([empty if row is None else row for row in rows])


def make_caches(state: BatchState | None, specs: Sequence[RecurrentSpec]) -> list[ArraysCache]:
    if state is not None and len(state.arrays) != len(specs):
        raise BrokenInvariant(f"a state of {len(state.arrays)} recurrent layers for a model that has {len(specs)}")
    caches = [ArraysCache(len(spec.tensors)) for spec in specs]
    for cache, arrays in zip(caches, () if state is None else state.arrays, strict=False):
        cache.cache = list(arrays)
    return caches


def state_of(caches: Sequence[ArraysCache], num_rows: int) -> BatchState:
    return BatchState([list(cache.cache) for cache in caches], num_rows)
