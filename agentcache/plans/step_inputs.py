from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from agentcache.adapters.weights import AdapterWeightSet
from agentcache.models.memory import Footprint
from agentcache.models.runner import ModelRunner
from agentcache.models.step import RowState, StepInputs
from agentcache.plans.plan import RequestPlan


class StepMaker:
    """Makes inputs of steps, whose first rows are the plans', in order."""

    def __init__(self, runner: ModelRunner, adapters: AdapterWeightSet) -> None:
        self._runner = runner
        self._adapters = adapters

    def make(
        self,
        plans: Sequence[RequestPlan],
        token_ids: mx.array,
        starts: Sequence[int],
        *,
        all_logits: bool,
        states: Sequence[RowState | None],
    ) -> StepInputs:
        """Return a step of the plans' current passes after `starts` tokens. `token_ids`: int32 [B, n], or lazy."""
        num_tokens, works = token_ids.shape[1], [plan.passes[0] for plan in plans]
        model, cut = self._adapters.decoder(works[0].model), works[0].cut
        extend = next((found for plan in plans if (found := plan.extend_step) is not None), None)
        step = StepInputs(
            token_ids,
            starts,
            reads=()
            if extend
            else self._runner.reads([plan.sequence.tables for plan in plans], starts, num_tokens, cut),
            writes=()
            if extend
            else self._runner.writes([work.writes.tables for work in works], starts, num_tokens, cut),
            model=None if model is None else model.model,
            adapters=self._adapters.rows([work.computes for work in works]),
            hidden_states=plans[0].hidden_states.plan(plans[0], starts[0], num_tokens),
            all_logits=all_logits,
            states=states,
        )
        return step if extend is None else extend(step, plans, self._runner, self._adapters)

    def check(self, plan: RequestPlan, start: int, num_tokens: int) -> None:
        """Raise if the row alone cannot be made."""
        work = plan.passes[0]
        self._adapters.decoder(work.model)
        self._adapters.rows([work.computes])
        self._runner.reads([plan.sequence.tables], [start], num_tokens, work.cut)
        self._runner.writes([work.writes.tables], [start], num_tokens, work.cut)


def step_bytes(
    footprint: Footprint, plans: Sequence[RequestPlan], starts: Sequence[int], num_tokens: int, *, all_logits: bool
) -> int:
    """Estimate a step's bytes; `num_tokens` per row."""
    if all(plan.extend_step is None for plan in plans):
        return footprint.step_bytes(starts, num_tokens, all_logits=all_logits)
    rows = [plan.contexts(start) for plan, start in zip(plans, starts, strict=True)]
    plain, added = ([context for row in rows for context in row[kind]] for kind in (0, 1))
    return footprint.step_bytes(plain, num_tokens, all_logits=all_logits, residual=added)
