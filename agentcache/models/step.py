"""One step as a value, and how a model's modules read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn

from agentcache.blocks.hidden_states import HiddenStatePlan
from agentcache.errors import BrokenInvariant
from agentcache.kv.step_cache import Reads, Writes
from agentcache.models.adapter_rows import AdapterRows, RowAdapter
from agentcache.models.recurrent import RowState
from agentcache.models.residual.rows import ResidualRows


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Inputs of one forward pass, beside weights and cache.

    Args:
        token_ids: int32 [B, n]; may be lazy results of a step in flight.
        lengths: tokens of each row before the step.
        reads, writes: one per cache group, None for groups below `hidden_states.cut`; empty on other kinds of caches.
        model: model that replaces base, on the same cache.
        adapters: adapter of each row, or None; empty for base alone.
        hidden_states: those to continue from and to keep, for one row by base. KV below its cut is cached.
        all_logits: whether logits of every position are wanted, not only of the last.
        states: recurrent state of each row; None for a row without tokens; empty without recurrent layers.
        residual: rows with residual KV. Then `reads` cover all rows, `writes` only `residual.writers`, if any.
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
        """Position of each row's first token: an int for one row, else int32 [B]."""
        return self.lengths[0] if len(self.lengths) == 1 else mx.array(self.lengths, mx.int32)

    @cached_property
    def adapter_rows(self) -> AdapterRows | None:
        return AdapterRows(self.adapters, self.lengths, self.token_ids.shape[1]) if any(self.adapters) else None


@dataclass(frozen=True, eq=False)
class StepOutputs:
    """Lazy results: logits [B, n or 1, vocabulary], and a recurrent state per row, even if empty."""

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
