from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import repeat

import mlx.core as mx

from agentcache.adapters.weights import AdapterWeightSet
from agentcache.engine.batch import Batch, BatchRow, Choice
from agentcache.engine.running_request import RunningRequest
from agentcache.models.runner import ModelRunner
from agentcache.models.sampler import Sampler, Scores
from agentcache.plans.step_inputs import StepMaker


class BatchBuilder:
    """Builds batches from the scheduler's plans."""

    def __init__(self, runner: ModelRunner, adapters: AdapterWeightSet, eos_ids: Collection[int]) -> None:
        self._runner = runner
        self._steps = StepMaker(runner, adapters)
        self._eos_ids = eos_ids

    def prepare(self, running: RunningRequest) -> None:
        running.progress.sampler = Sampler(running.request.sampling, self._eos_ids)

    def build(self, rows: Sequence[RunningRequest], num_tokens: int, before: Batch | None, *, contended: bool) -> Batch:
        """Build a batch of rows whose blocks are reserved. Advances `in_flight`; tokens of `before` may be inputs."""
        starts = [running.num_launched for running in rows]
        left = [running.num_to_launch for running in rows]
        inputs = self._inputs(rows, left, num_tokens, before)
        score_prompt = left[0] > 1 and rows[0].scores_prompt
        made = [BatchRow.of(running, count, num_tokens) for running, count in zip(rows, left, strict=True)]
        step = self._steps.make(
            [running.open_plan for running in rows],
            inputs,
            starts,
            all_logits=score_prompt,
            states=[running.progress.launched_state for running in rows]
            if self._runner.base.states is not None
            else (),
        )
        outputs = self._runner.forward(step)
        logits, states = outputs.logits, outputs.states if self._runner.base.states is not None else ()
        if logits.shape[0] > len(rows):  # further rows are a plan's own
            logits = logits[: len(rows)]
        ends = [start + num_tokens for start in starts]
        complete = [row.is_complete for row in made]
        choice = self._choose(made, ends, logits[:, -1], inputs[:, -1]) if any(complete) else None
        batch = Batch(
            self._runner,
            made,
            num_tokens=num_tokens,
            context=starts[0],
            choice=choice,
            prompt_scores=_score_prompt(rows[0], logits[0]) if score_prompt else None,
            contended=contended,
            states=states,
        )
        for running, state in zip(rows, states or repeat(None), strict=False):
            running.progress.launch(num_tokens, state)
        return batch

    def at_fault(self, rows: Sequence[RunningRequest], num_tokens: int) -> list[RunningRequest]:
        return [running for running in rows if not self._can_be_built(running, num_tokens)]

    def _can_be_built(self, running: RunningRequest, num_tokens: int) -> bool:
        try:
            start, left = running.num_launched, running.num_to_launch
            made = BatchRow.of(running, left, num_tokens)
            self._steps.check(running.open_plan, start, num_tokens)
            if made.is_complete:
                made.sampler_row(start + num_tokens)
        except BaseException:
            return False
        return True

    def _inputs(
        self, rows: Sequence[RunningRequest], left: Sequence[int], num_tokens: int, before: Batch | None
    ) -> mx.array:
        """Rows with nothing `left` take the token that `before` chooses."""
        if all(left):
            return mx.array([g.token_ids[g.num_launched : g.num_launched + num_tokens] for g in rows], mx.int32)
        choice = None if before is None else before.choice
        assert choice is not None and choice.tokens is not None
        indices = {row.running: index for index, row in enumerate(choice.rows)}
        known = [running.token_ids[-1] for running, count in zip(rows, left, strict=True) if count]
        if not known and [indices[running] for running in rows] == list(range(len(indices))):
            return choice.tokens[:, None]
        known_indices = iter(range(len(indices), len(indices) + len(known)))
        order = [next(known_indices) if count else indices[row] for row, count in zip(rows, left, strict=True)]
        return mx.concatenate([choice.tokens, mx.array(known, mx.int32)])[mx.array(order)][:, None]

    def _choose(self, rows: Sequence[BatchRow], ends: Sequence[int], logits: mx.array, last: mx.array) -> Choice:
        scored = [
            i for i, row in enumerate(rows) if row.is_complete and row.running.request.sampling.logprobs is not None
        ]
        choice = Choice(rows, ends, logits, last, scored)
        forms = [row.running.output.matcher for row in rows]
        if not any(forms):
            choice.make()
        return choice


def _score_prompt(running: RunningRequest, logits: mx.array) -> Scores | None:
    start = running.num_launched + 1
    targets = running.token_ids[start : start + logits.shape[0]]
    if not targets:
        return None
    count = running.request.sampling.logprobs or 0
    return Scores(logits[: len(targets)], mx.array(targets, mx.int32), count)
