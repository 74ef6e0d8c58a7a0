"""The state of a model's recurrent layers, of the rows of a step: put together before it, taken apart behind it.

Recurrent layers are mlx-lm's own; they keep their state in an `ArraysCache`, made anew for each step. Who keeps a row's
state from one step to the next is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from agentcache.errors import BrokenInvariant
from agentcache.kv.spec import RecurrentSpec, StateTensor
from agentcache.models.compat import ArraysCache

# One list of arrays per recurrent cache; None for an entry that the model has not filled.
Arrays = Sequence[Sequence[mx.array | None]]


@dataclass(frozen=True, eq=False)
class BatchState:
    """What a step left behind, for all its rows: arrays [B, ...]."""

    arrays: Arrays
    num_rows: int

    def rows(self) -> list[RowState]:
        """Row by row; nothing is copied."""
        return [RowState(self, index) for index in range(self.num_rows)]


@dataclass(frozen=True, eq=False)
class RowState:
    """One row's recurrent state behind the tokens that it has read: a row of a batch, whose arrays it keeps alive.

    Args:
        batch: lazily computed, see `ModelRunner.forward`.
        index: the row's, in it.
    """

    batch: BatchState
    index: int = 0

    @classmethod
    def of(cls, arrays: Arrays) -> RowState:
        """From arrays [1, ...] of its own, such as a snapshot's."""
        return cls(BatchState(arrays, 1))

    def arrays(self) -> list[list[mx.array | None]]:
        """Arrays [1, ...] of its own; lazy."""
        span = slice(self.index, self.index + 1)
        return [[None if array is None else array[span] for array in cache] for cache in self.batch.arrays]


def join(rows: Sequence[RowState | None], specs: Sequence[RecurrentSpec]) -> BatchState | None:
    """The rows' states as one batch, which costs nothing where they come from one batch in its order.

    Args:
        rows: None for a row that has read no tokens.

    Returns:
        None where no row has read any: the model begins by itself.
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
    """[B, ...] of the rows' [1, ...]; zeros for a row that has none, as mlx-lm's `ArraysCache.merge`."""
    empty = mx.zeros((1, *tensor.shape), getattr(mx, tensor.dtype))
    return mx.concatenate([empty if row is None else row for row in rows])


def make_caches(state: BatchState | None, specs: Sequence[RecurrentSpec]) -> list[ArraysCache]:
    """mlx-lm's caches for a step."""
    if state is not None and len(state.arrays) != len(specs):
        raise BrokenInvariant(f"a state of {len(state.arrays)} recurrent layers for a model that has {len(specs)}")
    caches = [ArraysCache(len(spec.tensors)) for spec in specs]
    for cache, arrays in zip(caches, () if state is None else state.arrays, strict=False):
        cache.cache = list(arrays)
    return caches


def state_of(caches: Sequence[ArraysCache], num_rows: int) -> BatchState:
    """What a step left in the caches that it was given."""
    return BatchState([list(cache.cache) for cache in caches], num_rows)
