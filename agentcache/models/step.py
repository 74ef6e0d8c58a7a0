"""One step as a value, and how a model's modules see it while they compute it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn

from agentcache.blocks.trunk import TrunkPlan
from agentcache.errors import BrokenInvariant
from agentcache.kv.step_plan import Reads, Writes
from agentcache.models.adapter_rows import AdapterRows, RowAdapter
from agentcache.models.recurrent import RowState
from agentcache.models.residual_rows import ResidualRows


@dataclass(frozen=True, eq=False)
class StepInputs:
    """All that one forward pass computes from, beside weights and what the cache holds.

    Args:
        token_ids: int32 [B, n]; may be what a step under way is about to choose.
        lengths: tokens each row holds before the step.
        reads, writes: one per cache group, None for groups below the trunk's cut; nothing where the model runs on
            caches of another kind.
        model: computes the step in place of the base model, on the same cache.
        adapters: per row the adapter it is computed with, or None; nothing for base alone.
        trunk: hidden states to go on from and to keep, for a step of one row by the base model. The cache holds keys
            and values below its cut already.
        all_logits: logits of every position are wanted, not only of the last one.
        states: per row what the model's recurrent layers keep of the tokens before; None for a row without tokens,
            nothing at all for a model without such layers.
        residual: the rows whose keys and values are base's with an adapter's residuals; None for none. Then `reads`
            are of all rows and `writes` of those that write base's, `residual.writers`, nothing where none does.
    """

    token_ids: mx.array
    lengths: Sequence[int]
    reads: Sequence[Reads | None] = ()
    writes: Sequence[Writes | None] = ()
    model: nn.Module | None = None
    adapters: Sequence[RowAdapter | None] = ()
    trunk: TrunkPlan = TrunkPlan()
    all_logits: bool = False
    states: Sequence[RowState | None] = ()
    residual: ResidualRows | None = None

    @cached_property
    def offset(self) -> int | mx.array:
        """Position of each row's first token: an int for one row, else int32 [B]."""
        return self.lengths[0] if len(self.lengths) == 1 else mx.array(self.lengths, mx.int32)

    @cached_property
    def adapter_rows(self) -> AdapterRows | None:
        """Who uses which adapter, for the modules that they act on; None where nobody does."""
        return AdapterRows(self.adapters, self.lengths, self.token_ids.shape[1]) if any(self.adapters) else None


@dataclass(frozen=True, eq=False)
class StepOutputs:
    """What one forward pass gives, all of it lazily computed.

    Args:
        logits: [B, n or 1, vocabulary].
        states: per row what recurrent layers keep behind the step; one a row, also where there is nothing to keep.
    """

    logits: mx.array
    states: Sequence[RowState]


class CurrentStep:
    """What the modules of a model know of the step that it computes. One a loaded model, which owns it.

    Attributes:
        step: None outside of a forward pass.
    """

    def __init__(self) -> None:
        self.step: StepInputs | None = None

    @contextmanager
    def of(self, step: StepInputs) -> Iterator[None]:
        """Inside, the model computes `step`."""
        if self.step is not None:
            raise BrokenInvariant("a step is computed inside another")
        self.step = step
        try:
            yield
        finally:
            self.step = None
