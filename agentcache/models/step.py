"""One step as a value, and how modules read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from agentcache.blocks.hidden_states import HiddenStatePlan
from agentcache.compat import ArraysCache
from agentcache.errors import BrokenInvariant
from agentcache.kv.reads import Reads
from agentcache.kv.spec import RecurrentSpec, StateTensor
from agentcache.kv.step_cache import Writes
from agentcache.models.adapters import AdapterRows, RowAdapter

if TYPE_CHECKING:
    from agentcache.models.residual.rows import ResidualRows

# Per recurrent cache; None for an unfilled entry.
Arrays = Sequence[Sequence[mx.array | None]]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Inputs of one forward pass, beside weights and cache.

    Args:
        token_ids: int32 [B, n]; may be lazy results of a step in flight.
        lengths: tokens before the step, by row.
        reads, writes: by cache group, None below `hidden_states.cut`; empty if the caller makes the caches.
        model: replaces base.
        hidden_states: only for one row by base.
        states: by row, None before its first token; empty without recurrent layers.
        residual: rows with residual KV. Then `reads` cover all rows, `writes` only `residual.writers`.
    """

    token_ids: mx.array
    lengths: Sequence[int]
    reads: Sequence[Reads | None] = ()
    writes: Sequence[Writes | None] = ()
    model: nn.Module | None = None
    adapters: Sequence[RowAdapter | None] = ()
    hidden_states: HiddenStatePlan = HiddenStatePlan()
    all_logits: bool = False
    states: Sequence[RowState | None] = ()
    residual: ResidualRows | None = None

    @cached_property
    def offset(self) -> int | mx.array:
        """Position of a row's first token: int for one row, else int32 [B]."""
        return self.lengths[0] if len(self.lengths) == 1 else mx.array(self.lengths, mx.int32)

    @cached_property
    def adapter_rows(self) -> AdapterRows | None:
        return AdapterRows(self.adapters, self.lengths, self.token_ids.shape[1]) if any(self.adapters) else None


@dataclass(frozen=True, eq=False)
class StepOutputs:
    """Lazy results: logits [B, n or 1, vocabulary], and each row's state, even if empty."""

    logits: mx.array
    states: Sequence[RowState]


class CurrentStep:
    """The step that a loaded model computes; None outside of a forward pass."""

    def __init__(self) -> None:
        self.step: StepInputs | None = None

    @contextmanager
    def of(self, step: StepInputs) -> Iterator[None]:
        if self.step is not None:
            raise BrokenInvariant("a step is computed inside another")
        self.step = step
        try:
            yield
        finally:
            self.step = None


@dataclass(frozen=True, eq=False)
class BatchState:
    """Recurrent state after a step: arrays [B, ...]."""

    arrays: Arrays
    num_rows: int

    def rows(self) -> list[RowState]:
        return [RowState(self, index) for index in range(self.num_rows)]


@dataclass(frozen=True, eq=False)
class RowState:
    """One row's recurrent state, lazy; it keeps the batch's arrays alive."""

    batch: BatchState
    index: int = 0

    @classmethod
    def of(cls, arrays: Arrays) -> RowState:
        """From arrays [1, ...]."""
        return cls(BatchState(arrays, 1))

    def arrays(self) -> list[list[mx.array | None]]:
        span = slice(self.index, self.index + 1)
        return [[None if array is None else array[span] for array in cache] for cache in self.batch.arrays]


def join(rows: Sequence[RowState | None], specs: Sequence[RecurrentSpec]) -> BatchState | None:
    """Join the rows' states, without a copy if they are one whole batch in order."""
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
    """Zeros for a row without state, as in `ArraysCache.merge`."""
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
